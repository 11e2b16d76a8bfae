# Two images from one file: `consumer`, small and without torch, for everything that watches, and `trainer` with it.
#
#     docker build --target consumer -t offloop-consumer .
#     docker build --target trainer -t offloop-trainer .
#
# Every package has the version that constraints.txt names. A mirror, or a digest in place of the tag:
# --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS base
ENV PATH=/opt/offloop/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore


# The package itself, which changes more often than what it needs.
FROM base AS package
WORKDIR /source
COPY constraints.txt ./
RUN pip install --quiet --constraint constraints.txt setuptools
COPY pyproject.toml LICENSE README.md ./
COPY bus bus
COPY consumers consumers
COPY offloop offloop
COPY trainer trainer
RUN pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels .


# What it needs, by a package of that name with nothing in it.
FROM base AS requirements
WORKDIR /source
COPY pyproject.toml constraints.txt ./
RUN touch LICENSE README.md && python -m venv --without-pip /opt/offloop


FROM requirements AS consumer-requirements
ARG EXTRAS=dashboard,nats,prometheus
RUN pip --python /opt/offloop install --constraint constraints.txt ".[${EXTRAS}]" \
    && pip --python /opt/offloop uninstall --quiet --yes offloop


FROM requirements AS trainer-requirements
# Torch for CPUs is a tenth of the size of torch with CUDA, which comes from PyPI when this is empty.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/offloop install --no-deps --constraint constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} torch \
    && pip --python /opt/offloop install --constraint constraints.txt ".[demo,nats]" \
    && pip --python /opt/offloop uninstall --quiet --yes offloop


FROM base AS runtime
# A volume takes over owner and mode of the folder that it is mounted at.
RUN groupadd --gid 10001 offloop \
    && useradd --uid 10001 --gid offloop --create-home --home-dir /home/offloop offloop \
    && for folder in /runs /checkpoints /state /logs /keys; \
        do install --directory --owner offloop --group offloop --mode 0700 "$folder"; done
COPY --chmod=0755 containers/with-keys containers/answers containers/train-host /usr/local/bin/
ENV OFFLOOP_RUNS_DIR=/runs OFFLOOP_KEYS_DIR=/keys
WORKDIR /home/offloop
STOPSIGNAL SIGTERM


FROM runtime AS trainer
COPY --from=trainer-requirements /opt/offloop /opt/offloop
RUN --mount=type=bind,from=package,source=/wheels,target=/wheels \
    pip --python /opt/offloop install --quiet --no-deps --no-index /wheels/*.whl
USER 10001:10001
CMD ["trainer", "--help"]


FROM runtime AS consumer
COPY --from=consumer-requirements /opt/offloop /opt/offloop
RUN --mount=type=bind,from=package,source=/wheels,target=/wheels \
    pip --python /opt/offloop install --quiet --no-deps --no-index /wheels/*.whl
USER 10001:10001
CMD ["consumer", "--help"]
