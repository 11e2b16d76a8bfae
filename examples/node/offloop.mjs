// A publisher and a follower of offloop's stream, written from docs/protocol.md.
import { spawn } from "node:child_process";
import { randomBytes, randomUUID } from "node:crypto";
import { open, readFile } from "node:fs/promises";
import { hostname } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { encode } from "@msgpack/msgpack";
import { Dealer, Subscriber } from "zeromq";
import { RecordingReader, unpack } from "./recording.mjs";

const VERSION = 1;
const INNER = new Set(
  (
    "before_dataloader after_dataloader batch_start before_train_batch before_forward after_forward before_loss " +
    "after_loss before_backward after_backward after_train_batch batch_checkpoint eval_batch_start " +
    "eval_before_forward eval_after_forward eval_batch_end predict_batch_start predict_before_forward " +
    "predict_after_forward predict_batch_end"
  ).split(" "),
);

const pack = (value) => Buffer.from(encode(value, { useBigInt64: true }));
const control = (kind, content) => Buffer.concat([Buffer.from([0]), pack([VERSION, kind, content])]);
const split = (frame) => {
  const end = frame.indexOf(0);
  return [Buffer.from(frame.subarray(0, end)).toString(), frame.subarray(end + 1)];
};
const controlOf = (frame) => (frame[0] === 0 ? unpack(frame.subarray(1)) : []);

// A connection to a control endpoint. It hands every message to `take(kind, content)`, and sends in order, one at a time.
class ControlConnection {
  constructor(address, take) {
    this.dealer = new Dealer({ linger: 0, routingId: `js-${randomBytes(8).toString("hex")}` });
    this.dealer.connect(address);
    this.sending = Promise.resolve();
    this.reading = this.read(take);
  }

  async read(take) {
    try {
      for await (const [frame] of this.dealer) {
        const [, kind, content] = controlOf(frame);
        if (kind !== undefined) take(kind, content);
      }
    } catch {
      // It was closed.
    }
  }

  send(frame) {
    this.sending = this.sending.then(() => this.dealer.send(frame)).catch(() => {});
    return this.sending;
  }

  close() {
    this.dealer.close();
  }
}

// The broker of one run, at Unix sockets in the run's directory; with `resume` after one that has died.
export async function startBroker(runsDir, run, what = "begin", python = process.env.PYTHON ?? "python3") {
  const child = spawn(python, ["-P", "-m", "offloop.bus.broker", what, runsDir, run], {
    stdio: ["ignore", "pipe", "inherit"],
    detached: true,
  });
  for await (const line of createInterface(child.stdout)) {
    const answer = JSON.parse(line);
    if (answer.error) throw new Error(`${answer.error}: ${answer.message}`);
    child.unref();
    return { address: answer.ready, process: child };
  }
  throw new Error("the broker did not start");
}

// Publishes a run: hello, events by number, and everything again that a broker lost.
export class Publisher {
  constructor(address, run, { info = {}, onCommand = () => {} } = {}) {
    this.address = address;
    this.run = run;
    this.onCommand = onCommand;
    this.hello = {
      run,
      rank: 0,
      world_size: 1,
      publisher_id: randomUUID(),
      pid: process.pid,
      host: hostname(),
      info,
    };
    this.seq = this.baseSeq = this.acknowledged = 0;
    this.kept = []; // [seq, frame] of what is not on disk yet
    this.restarts = 0;
    this.isWelcome = false;
    this.failure = null;
    this.context = { world_size: 1 };
    this.connect();
    this.timer = setInterval(() => this.look(), 250);
  }

  connect() {
    this.connection?.close();
    this.isWelcome = false;
    this.said = this.heard = Date.now();
    const connection = new ControlConnection(this.address, (kind, content) => connection === this.connection && this.take(kind, content));
    this.connection = connection;
    this.connection.send(control("hello", this.hello));
  }

  take(kind, content) {
    this.heard = Date.now();
    if (kind === "welcome") {
      this.isWelcome = true;
      this.hello.attempt = content.attempt;
      this.note(content.acknowledged);
      if (this.seq > 0) this.sendAgain();
    } else if (kind === "refused") {
      if (content.error !== "RunDirectoryError") this.failure = new Error(content.reason);
    } else if (kind === "unknown" && this.isWelcome) {
      this.restarts += 1;
      this.connect();
    } else if (kind === "ack") {
      this.note(content.seq);
    } else if (kind === "retransmit") {
      this.sendAgain();
    } else if (kind === "command") {
      this.obey(content);
    }
  }

  note(seq) {
    this.acknowledged = Math.max(this.acknowledged, Number(seq));
    while (this.kept.length && this.kept[0][0] <= this.acknowledged) this.kept.shift();
  }

  sendAgain() {
    this.connection.send(control("resume", { from: this.kept.length ? this.kept[0][0] : this.seq + 1 }));
    for (const [, frame] of this.kept) this.connection.send(frame);
  }

  look() {
    const now = Date.now();
    if (!this.isWelcome) {
      if (now - this.said > 2000) this.connect();
    } else if (this.kept.length && now - Math.max(this.heard, this.said) > 500) {
      // A broker that was started again says nothing until it is spoken to.
      this.said = now;
      this.connection.send(control("report", { last_sent: this.seq }));
    }
  }

  // Waits until `condition()` holds.
  async until(condition) {
    while (!condition()) {
      if (this.failure) throw this.failure;
      await sleep(5);
    }
  }

  async ready() {
    await this.until(() => this.isWelcome);
  }

  publish(event, batch, fields) {
    this.seq += 1;
    if (!INNER.has(event)) this.baseSeq += 1;
    const time = Array(14).fill(0);
    time[2] = batch;
    const now = BigInt(Date.now()) * 1_000_000n;
    const body = [VERSION, this.hello.attempt, this.seq, this.baseSeq, now, time, null, fields, this.context];
    const frame = Buffer.concat([Buffer.from(`${this.run}/${event}/0\0`), pack(body)]);
    this.kept.push([this.seq, frame]);
    if (this.isWelcome) this.connection.send(frame);
  }

  obey(command) {
    const { id } = command;
    const at = { event: "batch_end", error: null };
    this.onCommand(command);
    this.publish("$command", 0, { ...command, ...at });
    this.connection.send(control("applied", { id, batch: 0, ...at }));
  }

  async close(status = "finished") {
    this.publish("$end", 0, { status });
    await this.until(() => this.acknowledged >= this.seq);
    clearInterval(this.timer);
    this.connection.close();
  }
}

// Asks a control endpoint, and tries again when a broker was lost with the question.
export class Client {
  constructor(address) {
    this.address = address;
    this.asked = new Map();
    this.applied = new Map();
    this.connection = new ControlConnection(address, (kind, content) => {
      if (kind === "applied") this.applied.set(content.id, content);
      else this.asked.get(content.id)?.([kind, content]);
    });
  }

  async ask(kind, content, id = randomUUID()) {
    for (let tries = 0; tries < 60; tries++) {
      const answer = new Promise((resolve) => this.asked.set(id, resolve));
      this.connection.send(control(kind, { ...content, id }));
      const got = await Promise.race([answer, sleep(2000, null, { ref: false })]);
      this.asked.delete(id);
      if (got === null) continue;
      if (got[0] === "refused") throw new Error(got[1].reason);
      return got[1];
    }
    throw new Error(`no broker answers at ${this.address}`);
  }

  // Tells a training what to do, and waits until it has.
  async command(run, command, ...args) {
    const id = randomUUID();
    const told = await this.ask("command", { run, command, arguments: args }, id);
    if (told.ranks === 0) throw new Error(`nobody publishes run ${run}`);
    while (!this.applied.has(id)) await sleep(10);
    return this.applied.get(id);
  }

  close() {
    this.connection.close();
  }
}

async function receive(stream) {
  try {
    const [frame] = await stream.receive();
    return frame;
  } catch (error) {
    if (error.code === "EAGAIN") return null;
    throw error;
  }
}

// How a run stands, and its recording, from its directory on this host, whose broker may have ended with the run.
export function localSource(runsDir, run) {
  const folder = join(runsDir, run);
  const json = async (name) => {
    try {
      return JSON.parse(await readFile(join(folder, name), "utf8"));
    } catch (error) {
      if (error.code === "ENOENT") return undefined;
      throw error;
    }
  };
  const isThere = ({ pid, host }) => {
    try {
      return host !== hostname() || process.kill(pid, 0);
    } catch {
      return false;
    }
  };
  return {
    async find() {
      const record = await json("run.json");
      const newest = record?.attempts.at(-1);
      if (newest === undefined) return undefined;
      const isRunning = newest.status === "running";
      const status = !isRunning ? newest.status : newest.publishers.some(isThere) ? "live" : "lost";
      const known = { ...newest, recorded_as: record.name };
      return { ...known, status, live: isRunning && (await json("broker.json")) !== undefined };
    },
    async fetch(attempt, offset) {
      const file = await open(join(folder, `recording-${attempt}.mcap`));
      try {
        const { bytesRead, buffer } = await file.read(Buffer.alloc(1 << 18), 0, 1 << 18, offset);
        return buffer.subarray(0, bytesRead);
      } finally {
        await file.close();
      }
    },
    stream: () => `ipc://${join(folder, "feed.sock")}`,
  };
}

// Every event of a run from its first on, in order and once each: { event, rank, seq, batch, fields }.
export async function* follow(source, run) {
  let found = await source.find();
  while (found === undefined) {
    await sleep(100);
    found = await source.find();
  }
  const { attempt } = found;
  const last = new Map(); // rank to number
  const ended = new Set();
  let ranks = 1;
  const take = ([topic, body]) => {
    const [, event, rank] = topic.split("/");
    const [, , seq, , , timestamp, , fields, context] = unpack(body);
    if (Number(seq) <= (last.get(rank) ?? 0)) return [];
    last.set(rank, Number(seq));
    // An actor from world_size on is not a rank: the run does not end with it.
    if (event === "$end" && Number(rank) < Number(context.world_size ?? Infinity)) {
      ended.add(rank);
      ranks = Number(context.local_world_size ?? context.world_size ?? 1); // of a run on several hosts those of one
    }
    return [{ event, rank: Number(rank), seq: Number(seq), batch: Number(timestamp[2]), fields }];
  };
  const reader = new RecordingReader((offset) => source.fetch(attempt, offset));
  const stream = found.status === "live" ? new Subscriber({ linger: 0, receiveTimeout: 2000 }) : null;
  stream?.connect(source.stream(found));
  // In its topics a run keeps the name that it was begun with.
  const name = found.recorded_as ?? run;
  stream?.subscribe(`${name}/$all/`, `${name}/$beat/`);
  try {
    for await (const frame of reader.read()) yield* take(frame);
    while (ended.size < ranks) {
      const frame = stream && (await receive(stream));
      if (!frame) {
        // Nothing has come for a while: is anybody there still?
        const now = await source.find();
        for await (const recorded of reader.read()) yield* take(recorded);
        if (now?.status !== "live" || now.attempt !== attempt) return;
        continue;
      }
      const [topic, body] = split(frame);
      if (topic.includes("/$beat/")) {
        const [, ofAttempt, , , , onDisk] = unpack(body);
        if (Number(ofAttempt) !== attempt) return;
        if (onDisk.every(([one, seq]) => Number(seq) <= (last.get(String(one)) ?? 0))) continue;
      } else {
        let isComplete = true;
        for (const event of unpack(body)[2].frames.map(split)) {
          const next = (last.get(event[0].split("/")[2]) ?? 0) + 1;
          isComplete = Number(unpack(event[1])[2]) <= next;
          if (!isComplete) break;
          yield* take(event);
        }
        if (isComplete) continue;
      }
      for await (const recorded of reader.read()) yield* take(recorded);
    }
  } finally {
    stream?.close();
  }
}
