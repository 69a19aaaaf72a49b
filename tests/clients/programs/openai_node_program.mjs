// Calls a server with OpenAI's client for Node.js, as its documentation does.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The program lies elsewhere than the packages, so it names their folder.
const require = createRequire(pathToFileURL(`${process.env.CLIENT_FOLDER}/package.json`));
const { OpenAI } = require("openai");
const { zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const model = process.env.MEDHA_MODEL;
const client = new OpenAI({ maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const Answer = z.object({ final: z.boolean(), colour: z.enum(["red", "green"]) });

const checks = {
  "`models.list`, `models.retrieve`": async () => {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert.deepEqual(names, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  "`chat.completions.create`, whole and streamed": async () => {
    const asked = { model, messages, max_completion_tokens: 12, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    let text = "";
    const stream = await client.chat.completions.create({ ...asked, stream: true });
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, whole.choices[0].message.content);
    assert.ok(text);
  },
  "`chat.completions.parse` with a zod schema": async () => {
    const answer = await client.chat.completions.parse({
      model, messages, max_tokens: 200, seed: 1, response_format: zodResponseFormat(Answer, "answer"),
    });
    assert.ok(["red", "green"].includes(answer.choices[0].message.parsed.colour));
  },
  "`chat.completions.stream`, by its events, with a zod schema": async () => {
    let deltas = "";
    const runner = client.chat.completions
      .stream({ model, messages, max_tokens: 200, seed: 2, response_format: zodResponseFormat(Answer, "answer") })
      .on("content", (delta) => { deltas += delta; });
    const final = await runner.finalChatCompletion();
    assert.equal(deltas, final.choices[0].message.content);
    assert.equal(typeof final.choices[0].message.parsed.final, "boolean");
  },
  "`completions.create`": async () => {
    const answer = await client.completions.create({ model, prompt: "One", max_tokens: 4 });
    assert.equal(answer.usage.completion_tokens <= 4, true);
  },
  "`responses.create`, `responses.parse`, `responses.stream`": async () => {
    const answer = await client.responses.create({ model, input: "Hello", max_output_tokens: 16 });
    assert.ok(answer.output_text);
    const asked = { model, input: "Hello", max_output_tokens: 200, text: { format: zodTextFormat(Answer, "answer") } };
    assert.equal(typeof (await client.responses.parse(asked)).output_parsed.final, "boolean");
    const stream = client.responses.stream(asked);
    for await (const event of stream) assert.ok(event.type.startsWith("response."));
    assert.equal(typeof (await stream.finalResponse()).output_parsed.final, "boolean");
  },
  "A stream that is left early": async () => {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 2000, stream: true });
    for await (const chunk of stream) {
      assert.equal(chunk.object, "chat.completion.chunk");
      break;
    }
  },
  "Errors as the client's classes": async () => {
    await assert.rejects(
      client.chat.completions.create({ model, messages, store: true }),
      (error) => error instanceof OpenAI.BadRequestError && error.param === "store",
    );
    await assert.rejects(client.models.retrieve("other"), OpenAI.NotFoundError);
  },
};

for (const [check, call] of Object.entries(checks)) {
  let error = null;
  try {
    await call();
  } catch (problem) {
    error = problem.stack;
  }
  console.log(JSON.stringify({ check, error }));
}
