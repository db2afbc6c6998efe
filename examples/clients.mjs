// Drives a running server with the AI SDK: Responses, chat, completions and Messages, each streamed
// and not, with objects of a schema and a loop of tools.
//
//     cadenza serve &
//     npm install ai @ai-sdk/openai @ai-sdk/anthropic zod
//     node clients.mjs http://127.0.0.1:8000
//
// Node looks for packages beside this file: copy it to where they are installed. Exit code 1: the
// client did not get what it asked for. docs/apis.md says which versions were run. Without MODEL it
// is the first that the server lists.

import assert from "node:assert/strict";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
if (!url) {
  console.error("usage: node clients.mjs URL [MODEL]");
  process.exit(2);
}
const apiKey = process.env.CADENZA_API_KEY ?? "none";
const model = process.argv[3] ?? (await firstModel());
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey });

const prompt = "What is the weather in Paris?";
const place = z.object({ city: z.string().max(12) });
const weather = tool({
  description: "The weather.",
  inputSchema: place,
  execute: async ({ city }) => `Sunny in ${city}.`,
});

// The first model that the server lists.
async function firstModel() {
  const answer = await fetch(`${url}/v1/models`, {
    headers: { authorization: `Bearer ${apiKey}` },
  });
  assert.ok(answer.ok, `${url}/v1/models: ${answer.status}`);
  return (await answer.json()).data[0].id;
}

let failures = 0;

async function check(name, run) {
  try {
    await run();
    console.log(`${name}: ok`);
  } catch (error) {
    failures += 1;
    console.log(`${name}: ${error.name}: ${error.message}`);
  }
}

// The SDK reports errors of a stream to a callback, and ends the stream.
async function streamed(settings) {
  const errors = [];
  const result = streamText({ ...settings, onError: ({ error }) => errors.push(error) });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  if (errors.length) throw errors[0];
  return { text, calls: await result.toolCalls, result };
}

const dialects = {
  responses: openai(model),
  chat: openai.chat(model),
  messages: anthropic(model),
};

for (const [name, dialect] of Object.entries(dialects)) {
  const asked = { model: dialect, prompt, maxOutputTokens: 60, maxRetries: 0, temperature: 0 };
  const tools = { weather };
  const formed = { ...asked, output: Output.object({ schema: place }) };

  await check(`${name} text`, async () => {
    const { text } = await generateText(asked);
    assert.ok(text);
    assert.equal((await streamed(asked)).text, text);
  });
  await check(`${name} object`, async () => {
    assert.equal(typeof (await generateText(formed)).output.city, "string");
    place.parse(await (await streamed(formed)).result.output);
  });
  await check(`${name} calls`, async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
      const called = { ...asked, tools, toolChoice };
      assert.equal(typeof (await generateText(called)).toolCalls[0].input.city, "string");
      assert.equal(typeof (await streamed(called)).calls[0].input.city, "string");
    }
  });
  await check(`${name} loop`, async () => {
    const { steps, text } = await generateText({
      ...asked,
      tools,
      stopWhen: stepCountIs(3),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    });
    assert.equal(steps.length, 2);
    assert.ok(text);
  });
  await check(`${name} conversation`, async () => {
    const { prompt: content, ...rest } = asked;
    const messages = [{ role: "user", content }];
    const { response } = await generateText({ ...rest, messages });
    messages.push(...response.messages, { role: "user", content: "And in Rome?" });
    assert.ok((await generateText({ ...rest, messages })).text);
  });
}

for (const [name, dialect] of Object.entries({ responses: dialects.responses, chat: dialects.chat })) {
  await check(`${name} loop whose answer is an object`, async () => {
    const { output } = await generateText({
      model: dialect,
      prompt,
      maxOutputTokens: 60,
      maxRetries: 0,
      tools: { weather },
      output: Output.object({ schema: place }),
      stopWhen: stepCountIs(3),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    });
    assert.equal(typeof output.city, "string");
  });
}

await check("completions text", async () => {
  const asked = { model: openai.completion(model), prompt: "The capital of France is" };
  const bounded = { ...asked, maxOutputTokens: 8, maxRetries: 0, temperature: 0 };
  const { text } = await generateText(bounded);
  assert.ok(text);
  assert.equal((await streamed(bounded)).text, text);
});

process.exit(failures ? 1 : 0);
