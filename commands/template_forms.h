// The forms of conversations that models are tuned on, a row each, and what a chat template of that form is recognised
// by. Of rows with one name, the last is the one that --template takes where the checkpoint has no template of its own.
// Gemma 3's row, piece by piece: its template has a text that begins with <start_of_turn>, one of two line breaks, one
// that is "Invalid content type", and a filter `trim`. A turn and an answer stand between those words. The system comes
// before the first message of the user, with an empty line between. The text begins with the BOS, and what is said
// loses the white space around it.
#pragma once

// marks     with ~ between: what stands in the template, ` where a text in quotes begins and ends; !: what does not
// turn      a turn of the conversation: {} is what was said, {role} user, assistant or system; {bos} and {eos} stand in
//           tokenizer_config.json; %d and the like are strftime()'s
// answer    what the model answered;  system: what leads it; "": as `turn`
// standing  with ~ between: how the texts begin that together lead it where no system is given; %: the date
// words     bos: it begins so
//           trim: white space goes from both ends of what is said; whole: after folding; trim-answer, trim-system (end)
//           first, last: the system is folded into that user message; none: it is refused; always: "" if not given
//           turn: what stands there is a whole turn; no-slashes: /think in a system is refused
//           drop: an answer loses what stands up to its last </think>; lines, blanks: and newlines before, white space
//           around the rest; but-last: the last one does not; channels: it loses <|channel>...<channel|>
//           lines-first: it loses newlines before it; mute: nothing stands before the answer to come
struct Form {
    const char *name, *marks, *turn, *answer, *system, *standing, *words;
};

// clang-format off
const char chatml[] = "<|im_start|>{role}\n{}<|im_end|>\n",
           llama3[] = "<|start_header_id|>{role}<|end_header_id|>\n\n{}<|eot_id|>",
           granite[] = "<|start_of_role|>{role}<|end_of_role|>{}<|end_of_text|>\n";
const Form forms[] = {
    {"chatml",
     "`<|im_start|>~<|im_end|>~!think>~!thought~!im_sep~!List of tools: ~!trim~!strip~!strftime~<|im_end|>\n`",
     chatml, "", "", "<|im_start|>system\n", "turn"},
    {"chatml", "`<|im_start|>~<|im_end|>~!think>~!thought~!im_sep~!List of tools: ~!trim~!strip~!strftime",
     chatml, "", "", "", ""},
    {"qwen3", "`<|im_start|>~`</think>`~`<think>`~`\n<think>\n`~!`<think>\n`~!`<think>\n\n`~lstrip~!trim",
     chatml, "", "", "", "drop lines"},
    {"lfm2", "`<|im_start|>~List of tools: ~!trim", chatml, "", "", "", "bos"},
    {"lfm2.5", "`<|im_start|>~List of tools: ~trim~!CONTINUE_FINAL", chatml, "", "", "",
     "bos drop blanks but-last"},
    {"lfm2.5", "`<|im_start|>~List of tools: ~trim~CONTINUE_FINAL", chatml, "", "", "", "bos drop blanks"},
    {"smollm3", "`## Custom Instructions\n\n`~!`Today Date: `~!/system_override", chatml, "",
     "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nReasoning Mode: /think\n\n"
     "## Custom Instructions\n\n{}\n\n<|im_end|>\n",
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face. Your",
     "trim-system no-slashes lines-first"},
    {"smollm3", "`## Custom Instructions\n\n`~`Today Date: `~`%d %B %Y`~/system_override", chatml, "",
     "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: %d %B %Y\n"
     "Reasoning Mode: /think\n\n## Custom Instructions\n\n{}\n\n",
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face. Your",
     "trim-system no-slashes lines-first"},
    {"llama2", "`<<SYS>>\n`~`[INST] `~` [/INST]`~strip~!`<<SYS>>`", "{bos}[INST] {} [/INST]", " {} {eos}",
     "<<SYS>>\n{}\n<</SYS>>\n\n", "", "bos first whole mute"},
    {"llama3", "`<|start_header_id|>`~<|eot_id|>~trim~!Cutting Knowledge~!tool~!function", llama3, "", "", "",
     "bos trim"},
    {"llama3.1", "`Cutting Knowledge Date: December 2023\n`~!`%~`26 Jul 2024`~<|eot_id|>~trim~!image", llama3, "",
     "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
     "{}<|eot_id|>", "", "bos trim always"},
    {"llama3.1", "`Cutting Knowledge Date: December 2023\n`~`%d %b %Y`~<|eot_id|>~trim~!image", llama3, "",
     "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: %d %b %Y\n\n"
     "{}<|eot_id|>", "", "bos trim always"},
    {"mistral-v1", "`[INST] `~` [/INST]`~are supported!~` `~!`system`", "[INST] {} [/INST]", "{}{eos} ", "", "",
     "bos none mute"},
    {"mistral-v1", "`[INST] `~` [/INST]`~are supported!~!` `~!`system`", "[INST] {} [/INST]", "{}{eos}", "", "",
     "bos none mute"},
    {"mistral-v1", "` [INST] `~` [/INST]`~` `~`\n\n`", " [INST] {} [/INST]", " {}{eos}", "{}\n\n", "",
     "bos first mute"},
    {"mistral-v3", "`[INST] `~`[/INST]`~` `~`\n\n`~!SYSTEM_PROMPT~trim", "[INST] {}[/INST]", " {}{eos}", "{}\n\n", "",
     "bos last trim-answer mute"},
    {"mistral-nemo", "`[INST]`~`[/INST]`~!` `~`\n\n`~!SYSTEM_PROMPT~!trim", "[INST]{}[/INST]", "{}{eos}", "{}\n\n", "",
     "bos last mute"},
    {"mistral-v7", "`[INST] `~`[/INST]`~`[SYSTEM_PROMPT] `~` `", "[INST] {}[/INST]", " {}{eos}",
     "[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "", "bos mute"},
    {"mistral-tekken", "`[INST]`~`[SYSTEM_PROMPT]`~!`%~!trim", "[INST]{}[/INST]", "{}{eos}",
     "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "# HOW YOU SHOULD THINK", "bos mute"},
    {"mistral-tekken", "`[INST]`~`[SYSTEM_PROMPT]`~`%Y-%m-%d`~!trim", "[INST]{}[/INST]", "{}{eos}",
     "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "You are Mistral Small~%~.\n", "bos mute"},
    {"gemma2", "`<start_of_turn>`~`System role not supported`~trim", "<start_of_turn>user\n{}<end_of_turn>\n",
     "<start_of_turn>model\n{}<end_of_turn>\n", "", "", "bos trim none"},
    {"gemma3", "`<start_of_turn>`~`\n\n`~`Invalid content type`~trim", "<start_of_turn>user\n{}<end_of_turn>\n",
     "<start_of_turn>model\n{}<end_of_turn>\n", "{}\n\n", "", "bos trim first"},
    {"gemma4", "`<|turn>`~`<turn|>\n`~`<|channel>`~`<channel|>`~trim", "<|turn>{role}\n{}<turn|>\n",
     "<|turn>model\n{}<turn|>\n", "", "", "bos trim channels"},
    {"phi3", "`<|user|>\n`~`<|end|>\n`~`<|assistant|>\n`", "<|{role}|>\n{}<|end|>\n", "", "", "", ""},
    {"phi4-mini", "`<|`~`|>`~`<|end|>`~`<|tool|>`", "<|{role}|>{}<|end|>", "", "", "", ""},
    {"phi4", "`<|im_start|>user<|im_sep|>`", "<|im_start|>{role}<|im_sep|>{}<|im_end|>", "", "", "", ""},
    {"granite", "<|end_of_role|>`~`%B %d, %Y`", granite, "", "",
     "Knowledge Cutoff Date: April~%~. You are Granite~ You are a helpful AI assistant.`", ""},
    {"granite", "<|end_of_role|>`~!`%~`\n</tool_response>`", granite, "", "",
     "You are a helpful assistant. Please", ""},
    {"granite", "<|end_of_role|>`~!`%", granite, "", "", "", ""},
    {"deepseek-r1", "`<｜User｜>`~`<｜Assistant｜>`~`</think>`~!outputs▁end｜><~!enable_thinking",
     "<｜User｜>{}", "<｜Assistant｜>{}<｜end▁of▁sentence｜>", "{}", "", "bos drop"},
    {"olmo2", "`<|user|>\n`~`<|assistant|>\n`~`\n`~eos_token~!<|end|>~!`<|user|>\n` + message[`content`] + eos",
     "<|{role}|>\n{}\n", "<|{role}|>\n{}{eos}\n", "", "", "bos"},
    {"zephyr", "`<|user|>\n`~`<|assistant|>`~!`\n`~eos_token", "<|{role}|>\n{}{eos}\n", "", "", "", ""},
    {"plain", "{# of a model that was not tuned for chat #}", "{}", "{}\n", "{}\n", "", ""},
};
// clang-format on
