"""What fields mean that clients of further engines send; a part of `meanings.MEANINGS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OF_DIALECTS: Mapping[str, str] = MappingProxyType(
    {
        # TGI
        "adapter_id": "Adapters are not available; leave it out.",
        "decoder_input_details": "Tell the prompt's tokens with their log-probabilities.",
        "do_sample": "Draw tokens. Default: only where a temperature or a filter is sent, or no parameters at all.",
        "error_type": "Which kind of error it is.",
        "inputs": "The text.",
        "max_new_tokens": "Most tokens of the answer. Default: what the context leaves.",
        "parameters": "How to sample, and what is told of it.",
        "return_full_text": "Begin the answer with the prompt.",
        "top_n_tokens": "So many alternatives of every token, with their log-probabilities.",
        "TgiParameters.details": "Tell the tokens of the answer, and why it ended.",
        "TgiParameters.grammar": "The form of the answer: a type (json, regex, json_schema) and its value.",
        "TgiParameters.stop": "Texts at which the answer ends, with which it then ends.",
        "TgiParameters.truncate": "Keep so many last tokens of the prompt.",
        # SGLang
        "abort_all": "Requests are ended one by one; leave it out.",
        "custom_params": "Extensions of other engines are not here; leave it out.",
        "ebnf": "A grammar that the whole answer follows.",
        "extra_key": "Cached prefixes are shared only with requests that bring the same.",
        "input_ids": "Token ids, or a list of such.",
        "logprob_start_len": "The first position of the prompt whose log-probabilities are told; -1 for none.",
        "min_new_tokens": "Fewest tokens before the answer may end.",
        "no_stop_trim": "Leave the stop string at the answer's end.",
        "regex": "A pattern that the whole answer matches.",
        "retryable": "Whether the same request may be taken later.",
        "return_logprob": "Tell the log-probabilities of the answer, and of the prompt from logprob_start_len on.",
        "return_prompt_token_ids": "Tell the token ids of the prompt.",
        "return_text_in_logprobs": "Tell each token's text with its log-probability.",
        "rid": "The request's name, by which it can be ended; of many prompts what theirs begin with, or a list.",
        "SglangBody.sampling_params": "How to sample: of all prompts, or a list of one for each.",
        "sampling_seed": "Where the random stream starts: the same request with the same seed has the same answer.",
        "spaces_between_special_tokens": "Tokens are told byte for byte; no spaces are put between them.",
        "stop_regex": "Answers do not end at patterns here.",
        "stream_interval": "Events go out as tokens come; of long answers not with every token.",
        "structural_tag": "A structural tag that the answer follows.",
        "top_logprobs_num": "So many alternatives of every token, with their log-probabilities.",
        "SglangBody.priority": "Requests of larger numbers go first.",
        "SglangBody.text": "The text, or a list of texts.",
        "SglangPoolingBody.text": "The text, or a list of texts.",
        "SglangParams.max_new_tokens": "Most tokens of the answer; 0 to compute the prompt alone. Default: 128.",
        # KServe and Triton
        "exclude_input_in_output": "false: the output begins with the prompt.",
        "id": "The request's name, which the answer tells again.",
        "min_length": "Another name of min_tokens.",
        "outputs": "The tensors that are wanted, in binary or not.",
        "random_seed": "Another name of seed.",
        "stop_words": "Another name of stop.",
        "text_input": "The text to continue.",
        "KserveInferBody.inputs": "The tensors: text_input, and parameters of one element.",
        # Kobold
        "bypass_eos": "Go on past the token with which the model ends its answer.",
        "genkey": "The answer's name, under which it is asked for while it is written, and ended.",
        "max_context_length": "Tokens of prompt and answer together; the prompt loses its beginning to fit.",
        "max_length": "Most tokens of the answer. Default: 768, or half the context.",
        "memory": "A text that stays in front of the prompt, whatever that loses.",
        "rep_pen": "Above 1, tokens seen already become less likely.",
        "rep_pen_range": "Penalties look at so many last tokens; 0 for all. Default: 320.",
        "render_special": "Leave special tokens in the text.",
        "sampler_seed": "Where the random stream starts; -1 for any.",
        "special": "Whether tokens such as a text's beginning are counted. Default: they are.",
        "stop_sequence": "Texts at which the answer ends.",
        "trim_stop": "false: leave the stop string at the answer's end.",
        "use_default_badwordsids": "Go on past the token with which the model ends its answer.",
        "KoboldBody.prompt": "The text to continue.",
        "TokenCountBody.prompt": "The text.",
        "KoboldErrorBody.detail": "What went wrong.",
    }
)
