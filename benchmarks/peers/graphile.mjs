// graphile-worker with its local queue: one fetch locks 500 messages, completions are batched, 24 run at once.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const modules = createRequire(`${process.env.PEER_DIRECTORY}/`);
const load = (name) => import(pathToFileURL(modules.resolve(name)).href);
const { Logger, makeWorkerUtils, run } = await load("graphile-worker");
const { default: pg } = await load("pg");

const TASK = "notify";
const CONCURRENCY = 24;
const LOCAL_QUEUE = 500;
const logger = new Logger(() => () => {});

export class Contender {
  constructor(url) {
    this.url = url;
  }

  async setup() {
    this.utils = await makeWorkerUtils({ connectionString: this.url, logger });
    await this.utils.migrate();
    this.client = new pg.Client(this.url);
    await this.client.connect();
  }

  async enqueueOne(job) {
    await this.utils.addJob(TASK, job);
  }

  async enqueueMany(jobs) {
    await this.utils.addJobs(jobs.map((payload) => ({ identifier: TASK, payload })));
  }

  async left() {
    const answer = await this.client.query("SELECT count(*) FROM graphile_worker._private_jobs");
    return Number(answer.rows[0].count);
  }

  async drain(tally, ready) {
    await ready();
    await run({
      logger,
      taskList: { [TASK]: async (job) => tally.count(job) },
      preset: {
        worker: {
          connectionString: this.url,
          concurrentJobs: CONCURRENCY,
          maxPoolSize: CONCURRENCY + 2,
          localQueue: { size: LOCAL_QUEUE },
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
        },
      },
    });
    await new Promise(() => {});
  }
}
