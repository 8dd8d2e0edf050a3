// Reads a GGUF file with llama.cpp: node llama_cpp.mjs REQUEST.json, which names
// {module, model, lora, texts, prompts, tokens}. Prints JSON: the version, the ids of each text, and
// the ids that greedy generation adds to each prompt, itself a list of ids.
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const request = JSON.parse(readFileSync(process.argv[2], "utf8"));
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(request.module).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: request.model, useMmap: false});
const ids = request.texts.map((text) => model.tokenize(text, true));
const context = await model.createContext({
    contextSize: 1024,
    lora: request.lora ?? undefined,
    threads: 1,  // several would wait for each other on a busy machine
    flashAttention: false,
    experimentalKvCacheKeyType: "F32",
    experimentalKvCacheValueType: "F32",
});
const sequence = context.getSequence();
const answers = [];
for (const prompt of request.prompts) {
    await sequence.clearHistory();
    const answer = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        if (model.isEogToken(token) || answer.push(token) === request.tokens) break;
    }
    answers.push(answer);
}
console.log(JSON.stringify({version: llama.llamaCppRelease?.release ?? "", ids, answers}));
process.exit(0);
