// One process of a contender written in JavaScript: `node agent.mjs MODULE URL`.
// It takes the same orders as benchmarks/agent.py and writes the same bytes as benchmarks/board.py.

import fs from "node:fs";
import readline from "node:readline";

const WARM_UP = 50;
const BULK = 1000;
const HEADER_BYTES = 64;
const RECORD_BYTES = 16;

const now = () => process.hrtime.bigint();
const seconds = () => Number(now()) / 1e9;
const sleep = (time) => new Promise((wake) => setTimeout(wake, Math.max(0, time * 1000)));
const makeJob = (seq) => ({ seq, t0: Number(now()), to: "user-000123@example.com", template: "welcome" });
const makeJobs = (first, end) => Array.from({ length: end - first }, (_, index) => makeJob(first + index));

// Runs are collected and written once per turn of the event loop: a write for each would cost more than the run.
class Tally {
  constructor(path) {
    this.file = fs.openSync(path, "r+");
    this.ran = 0;
    this.startedAt = 0n;
    this.fresh = [];
  }

  count(job) {
    const at = now();
    if (!this.startedAt) this.startedAt = at;
    if (!this.fresh.length) setImmediate(() => this.flush());
    this.fresh.push(BigInt(job.seq), at - BigInt(job.t0));
  }

  flush() {
    const records = BigInt64Array.from(this.fresh);
    fs.writeSync(this.file, records, 0, records.byteLength, HEADER_BYTES + this.ran * RECORD_BYTES);
    this.ran += this.fresh.length / 2;
    this.fresh = [];
    const header = BigInt64Array.of(this.startedAt, BigInt(this.ran));
    fs.writeSync(this.file, header, 0, header.byteLength, 0);
  }
}

class Agent {
  constructor(contender, wires) {
    this.contender = contender;
    this.wires = wires;
  }

  async setup() {
    await this.contender.setup();
  }

  async send({ seconds: length }) {
    for (let seq = 0; seq < WARM_UP; seq++) await this.contender.enqueueOne(makeJob(seq));
    const start = seconds();
    let sent = 0;
    while (seconds() < start + length) await this.contender.enqueueOne(makeJob(WARM_UP + sent++));
    return sent / (seconds() - start);
  }

  async bulk({ seconds: length }) {
    await this.fill({ messages: WARM_UP });
    const start = seconds();
    let sent = 0;
    while (seconds() < start + length) {
      await this.contender.enqueueMany(makeJobs(WARM_UP + sent, WARM_UP + sent + BULK));
      sent += BULK;
    }
    return sent / (seconds() - start);
  }

  async fill({ messages, first = 0 }) {
    const last = first + messages;
    for (let start = first; start < last; start += BULK) {
      await this.contender.enqueueMany(makeJobs(start, Math.min(start + BULK, last)));
    }
  }

  async pace({ messages, per_second, first }) {
    const start = seconds();
    for (let number = 0; number < messages; number++) {
      await sleep(start + number / per_second - seconds());
      await this.contender.enqueueOne(makeJob(first + number));
    }
  }

  async left() {
    const askedAt = Number(now());
    return [askedAt, await this.contender.left()];
  }

  async drain({ board }) {
    await this.contender.drain(new Tally(board), () => this.wires.waitForBegin());
  }
}

class Wires {
  constructor() {
    const lines = readline.createInterface({ input: process.stdin });
    lines.on("close", () => process.exit(0));
    this.orders = lines[Symbol.asyncIterator]();
  }

  async nextOrder() {
    return JSON.parse((await this.orders.next()).value);
  }

  answer(fields) {
    process.stdout.write(`${JSON.stringify(fields)}\n`);
  }

  async waitForBegin() {
    this.answer({ answer: null });
    await this.nextOrder();
  }
}

const [module, url] = process.argv.slice(2);
const { Contender } = await import(module);
const wires = new Wires();
const agent = new Agent(new Contender(url), wires);
for (;;) {
  const { do: name, ...options } = await wires.nextOrder();
  try {
    wires.answer({ answer: (await agent[name](options)) ?? null });
  } catch (error) {
    console.error(error);
    wires.answer({ error: error.name, text: error.message });
  }
}
