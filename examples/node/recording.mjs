// Reads a recording as it grows: chunks of MCAP, each behind the check record that makes it final.
import { decode } from "@msgpack/msgpack";
import { decompress } from "fzstd";

const MAGIC = 8;
const HEAD = 9;
const [FOOTER, CHANNEL, MESSAGE, CHUNK, CHECK] = [0x02, 0x04, 0x05, 0x06, 0x80];

// Integers of 64 bits are BigInt, because a time in nanoseconds is no safe Number.
export const unpack = (bytes) => decode(bytes, { useBigInt64: true });

export class RecordingReader {
  // `fetch(offset)` gives the bytes of the recording from there on, some of them, none at its end.
  constructor(fetch) {
    this.fetch = fetch;
    this.offset = 0; // where the last check record ends
  }

  // The frames of all file parts that are whole by now, as [topic, body].
  async *read() {
    // What came behind the last check record may have been replaced since.
    let kept = new Uint8Array(0);
    let waiting = [];
    let at = this.offset === 0 ? MAGIC : 0;
    for (;;) {
      const piece = await this.fetch(this.offset + kept.length);
      if (piece.length === 0) return;
      kept = Buffer.concat([kept, piece]);
      for (;;) {
        if (kept.length < at + HEAD) break;
        const opcode = kept[at];
        const length = Number(Buffer.from(kept.buffer, kept.byteOffset + at + 1, 8).readBigUInt64LE());
        if (kept.length < at + HEAD + length) break;
        const content = kept.subarray(at + HEAD, at + HEAD + length);
        if (opcode === FOOTER) return;
        if (opcode === CHUNK) waiting.push(content);
        at += HEAD + length;
        if (opcode === CHECK) {
          this.offset += at;
          kept = kept.subarray(at);
          at = 0;
          for (const chunk of waiting) yield* framesOf(chunk);
          waiting = [];
        }
      }
    }
  }
}

function* framesOf(content) {
  const chunk = Buffer.from(content);
  const size = Number(chunk.readBigUInt64LE(16));
  const data = 28 + 4 + chunk.readUInt32LE(28) + 8;
  const records = Buffer.from(decompress(chunk.subarray(data), new Uint8Array(size)));
  const topics = new Map();
  for (let at = 0; at < records.length; ) {
    const [opcode, length] = [records[at], Number(records.readBigUInt64LE(at + 1))];
    const record = records.subarray(at + HEAD, at + HEAD + length);
    if (opcode === CHANNEL) {
      topics.set(record.readUInt16LE(0), record.toString("utf8", 8, 8 + record.readUInt32LE(4)));
    } else if (opcode === MESSAGE) {
      yield [topics.get(record.readUInt16LE(0)), record.subarray(22)];
    }
    at += HEAD + length;
  }
}
