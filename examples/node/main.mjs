// node main.mjs publish ADDRESS RUN EVENTS | serve RUNS_DIR RUN EVENTS
// node main.mjs follow RUNS_DIR RUN | stop ADDRESS RUN
//
// `publish` goes to a broker at an address, `serve` starts the run's own one, and starts it again when it dies.
import { setTimeout as sleep } from "node:timers/promises";
import { Client, Publisher, follow, localSource, startBroker } from "./offloop.mjs";

const [what, where, run, events] = process.argv.slice(2);
const say = (value) => console.log(JSON.stringify(value, (_, one) => (typeof one === "bigint" ? Number(one) : one)));

async function publish(address) {
  let isToStop = false;
  const onCommand = ({ command }) => (isToStop ||= command === "stop");
  const publisher = new Publisher(address, run, { info: { command: "main.mjs" }, onCommand });
  await publisher.ready();
  say({ ready: publisher.hello.attempt });
  for (let batch = 1; batch <= Number(events) && !isToStop; batch++) {
    publisher.publish("batch_end", batch, { loss: 1 / batch, note: `batch ${batch}` });
    await sleep(2);
  }
  await publisher.close(isToStop ? "stopped" : "finished");
  say({ published: publisher.seq, restarts: publisher.restarts });
}

async function serve() {
  let isOver = false;
  const begin = async (how) => {
    const { address, process: child } = await startBroker(where, run, how);
    child.on("exit", () => isOver || begin("resume"));
    return address;
  };
  const address = await begin("begin");
  await publish(address);
  isOver = true;
}

if (what === "publish") await publish(where);
else if (what === "serve") await serve();
else if (what === "follow") {
  for await (const event of follow(localSource(where, run), run)) say(event);
} else if (what === "stop") {
  const client = new Client(where);
  say(await client.command(run, "stop"));
  client.close();
}
