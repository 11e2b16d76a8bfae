"""Keras's introduction, watched: the marked lines are ours.

    KERAS_BACKEND=torch python examples/keras_quickstart.py   in one terminal
    consumer --callbacks speed,lr,metrics                     in another, before it or while it runs; --last: after it
    offloop send NAME stop                                stops it after the current batch; NAME is in its output

Source: https://keras.io/getting_started/intro_to_keras_for_engineers/; its pictures are drawn here, to avoid downloads.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

# Note that Keras should only be imported after the backend has been configured. The backend cannot be changed once the
# package is imported.
import keras
import numpy as np

from offloop.keras import OffloopCallback  # <- this

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw pictures of shape (28, 28, 1): a pattern for each of ten classes, with noise."""
    patterns = np.random.default_rng(0).random((10, 28, 28, 1))
    labels = np.random.randint(10, size=count)
    return (patterns[labels] + np.random.random((count, 28, 28, 1))).astype("float32") / 2, labels


x_train, y_train = digits(1280)
x_test, y_test = digits(256)

# Model parameters
num_classes = 10
input_shape = (28, 28, 1)

model = keras.Sequential(
    [
        keras.layers.Input(shape=input_shape),
        keras.layers.Conv2D(16, kernel_size=(3, 3), activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(num_classes, activation="softmax"),
    ]
)

model.summary()

model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(),
    optimizer=keras.optimizers.Adam(learning_rate=1e-3),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
)

batch_size = 128

callbacks = [
    keras.callbacks.ModelCheckpoint(filepath="model_at_epoch_{epoch}.keras"),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=epochs),
    OffloopCallback(),  # <- this
]

model.fit(
    x_train,
    y_train,
    batch_size=batch_size,
    epochs=epochs,
    validation_split=0.15,
    callbacks=callbacks,
)
score = model.evaluate(x_test, y_test, verbose=0)
print(f"test: loss {score[0]:.3f}, accuracy {score[1]:.1%}")
