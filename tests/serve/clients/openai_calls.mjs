// The ordinary calls of OpenAI's client for Node; prints what they returned as JSON. Argument: the server's address.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The package lies where `make clients` has put it, not beside this file.
const require = createRequire(`${process.env.OUTPACE_CLIENTS}/package.json`);
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const options = { model: "tiny", temperature: 1, seed: 7 };
const messages = [
  { role: "system", content: "Be kind." },
  { role: "user", content: "Tell me about a cat." },
];

const chat = await client.chat.completions.create({ ...options, messages, max_completion_tokens: 16, logprobs: true, top_logprobs: 2 });

const stream = await client.chat.completions.create({
  ...options, messages, max_completion_tokens: 16, stream: true, stream_options: { include_usage: true },
});
let streamed = "", pieces = 0, usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
  pieces += 1;
}

// The helper that puts a stream together by itself.
const helper = client.chat.completions.stream({ ...options, messages, max_completion_tokens: 16 });
const finished = await helper.finalChatCompletion();

const text = await client.completions.create({ ...options, prompt: "One day", max_tokens: 16, n: 2, stop: "." });
const shaped = await client.chat.completions.create({
  ...options, messages,
  response_format: {
    type: "json_schema",
    json_schema: {
      name: "colour", strict: true,
      schema: { type: "object", properties: { colour: { type: "string", enum: ["red", "blue"] } }, required: ["colour"], additionalProperties: false },
    },
  },
});

// Whoever stops in the middle gives the row back.
const endless = await client.completions.create({ ...options, prompt: "a", max_tokens: 400, stream: true });
for await (const _ of endless) {
  endless.controller.abort();
  break;
}

let refused;
try {
  await client.completions.create({ ...options, prompt: "a", top_p: 7 });
} catch (error) {
  refused = { kind: error.constructor.name, status: error.status, param: error.param };
}

const models = [];
for await (const model of client.models.list()) models.push(model.id);

console.log(JSON.stringify({
  chat: chat.choices[0].message.content,
  usage: chat.usage.total_tokens,
  logprobs: chat.choices[0].logprobs.content.map((token) => token.top_logprobs.length),
  streamed, pieces, streamed_usage: usage.total_tokens,
  helper: finished.choices[0].message.content,
  texts: text.choices.map((choice) => choice.text),
  shaped: JSON.parse(shaped.choices[0].message.content),
  refused, models,
}));
