"""Hard limits on what a client may ask. One place, so that a reviewer can read them at once.

The ceilings follow what the field settled on; the defaults here are tighter where a public server needs it.
"""

from __future__ import annotations

# HTTP
MAX_BODY_BYTES = 32 * 2**20
MAX_UPLOAD_BYTES = 2**40  # of one file of a model, which goes to disk as it comes
MAX_FILES_OF_A_MODEL = 2000
MAX_BODIES_BYTES = 256 * 2**20  # of all requests in flight, without the first SMALL_BODY_BYTES of each
SMALL_BODY_BYTES = 64 * 2**10
MAX_HEADER_BYTES = 64 * 2**10
MAX_HEADERS = 256
MAX_QUERY_FIELDS = 128
MAX_JSON_DEPTH = 64
MAX_JSON_ITEMS = 2**19  # values
MAX_JSON_PARTS = 2**17  # of these, strings, lists and objects, keys included
HEADER_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 10.0
SLOWEST_BODY_BYTES_PER_S = 64 * 2**10
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they, not the server, close them
MAX_API_SERVERS = 64
LISTEN_BACKLOG = 2048
STREAM_BUFFER_EVENTS = 4096
READ_AHEAD_EVENTS = 256  # of one answer, made before the client has taken them
STREAM_STALL_TIMEOUT_S = 60.0
SSE_KEEPALIVE_S = 15.0
DRAIN_TIMEOUT_S = 30.0
MAX_REQUEST_ID_CHARS = 128

# Streams that go on without their client
MAX_CONVERSATION_CHARS = 256
MAX_RESUMABLE_STREAMS = 256  # that run
MAX_RESUMABLE_STREAM_BYTES = 4 * 2**20  # of one, as in llama-server; its beginning is dropped
MAX_RESUMABLE_BYTES = 64 * 2**20  # of all
RESUMABLE_S = 300.0  # that one is kept when it has ended

# Tools that the server's machine runs
TOOL_S = 30  # that a call takes at the most, unless the file of servers says otherwise
MAX_TOOL_S = 600
MAX_TOOL_CHARS = 2**18  # of an answer
MAX_TOOL_CALLS_WAITING = 64  # of one server

# WebSockets
SOCKET_S = 3600.0  # that one may be open, as at OpenAI
SOCKET_SILENCE_S = 60.0  # after a ping that is not answered
MAX_STREAMS_OF_A_SOCKET = 8  # that run beside each other
MAX_STREAM_ID_CHARS = 128
MAX_WAITING_MESSAGES = 16  # of one connection, while others of their stream are answered
MAX_WAITING_BYTES = 2**20  # of all of these
MAX_RECENT_RESPONSES_BYTES = 64 * 2**20  # that are not kept, but that their connections go on from

# The machine
MAX_THREADS = 1024

# Queueing
MAX_QUEUED_REQUESTS = 4096
MAX_QUEUED_TOKENS = 16 * 2**20
MAX_QUEUE_SECONDS = 30.0  # of work, unless --max-queue-seconds says otherwise
MAX_MODEL_NAME_CHARS = 256
MAX_LORAS = 1024  # in slots
MAX_LORA_RANK = 1024
MAX_CPU_LORAS = 1_000_000
MAX_MODEL_WAITERS = 1024  # calls that wait for models to be loaded

# One request
MAX_N = 128
MAX_PROMPTS_PER_CALL = 1024
MAX_MODERATED_TEXTS = 128  # of one call; some guards are asked five questions of each
MAX_QUESTIONS = 400  # of one decision
MAX_DECISION_OPTIONS = 255  # of one of its questions
MAX_DECISION_CHARS = 2**26  # of its input, which is written once for each question
MAX_SHARED_WORK = 2**20  # characters of a grammar, say, that each prompt of a call needs anew
MAX_PATTERN = 256  # tokens of a pattern whose repetition ends an answer
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_REGEXES = 8
MAX_STOP_REGEX_CHARS = 512  # of one
MAX_STOP_REGEX_STATES = 128  # of all: each is looked at with every character
MAX_STOP_REGEX_DEPTH = 16  # of groups
MAX_BAD_WORDS = 128
MAX_BANNED_STRINGS = 512
MAX_BANNED_STRING_CHARS = 256
MAX_BANNED_CHARS = 8192  # of all banned strings of a request
MAX_BAD_WORD_TOKENS = 1024
MAX_LOGIT_BIAS = 1024  # entries
MAX_LOGITS_PROCESSORS = 8
MAX_PROCESSOR_ARGUMENT_CHARS = 16_384  # of one, in JSON
WATERMARK_KEY = 15_485_863  # of texts that nobody gave a key
MAX_WATERMARK_KEY = 2**53
MAX_BIAS = 100.0  # of one entry, up or down
GUIDANCE_SCALES = (0.0, 100.0)
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0  # presence and frequency, up or down
MAX_REPETITION_PENALTY = 100.0
MAX_ALLOWED_TOKEN_IDS = 2**19
MAX_SAMPLERS = 64  # names of an order
MAX_SAMPLER_CHARS = 40  # of a name
MAX_ORDER_CHARS = 4096  # of names or letters in one string
MAX_NGRAM = 1024
MAX_BREAKERS = 16  # of DRY
MAX_BREAKER_CHARS = 40
MAX_BREAKER_IDS = 4096  # that a caller names
MAX_BREAKER_SEQUENCES = 4096  # of tokens that spell them together; more are passed over
MAX_BREAKER_TOKENS = 16_384  # of all sequences
MAX_PROTECTED_IDS = 1024  # of XTC
MAX_TOKEN_ID = 2**31 - 1
MAX_TOP_LOGPROBS = 20  # alternatives of a token, unless --max-logprobs says otherwise
MAX_VOCABULARY = 2**24  # alternatives that may be asked for at all
MAX_LOGPROB_TOKEN_IDS = 1024
MAX_TOLD_LOGPROBS = 2**19  # of one request that wants more than MAX_TOP_LOGPROBS with a token
MAX_TOLD_LOGPROBS_IN_FLIGHT = 2**22  # of all such requests of an HTTP process
MAX_TOKENS = 2**31 - 1
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MIN_SEED = -(2**63)
MAX_TOOLS = 128
MAX_MESSAGES = 10_000
MAX_CACHE_SALT_CHARS = 256
MAX_USER_CHARS = 1024
MIN_PRIORITY = -(2**31)
MAX_PRIORITY = 2**31 - 1

# Responses that are kept
MAX_STORED_RESPONSES_BYTES = 256 * 2**20
MAX_STORED_RESPONSE_AGE_S = 30 * 86400.0  # as OpenAI keeps them
MAX_ITEMS_PER_CALL = 20  # that are added to a conversation, as at OpenAI
MAX_REFERENCED_RESPONSES = 64  # by the items of one request
MAX_BACKGROUND_JOBS = 256

# Text
TEMPLATE_TIMEOUT_S = 2.0
TEMPLATE_MAX_CHARS = 16 * 2**20
MAX_TEMPLATE_SOURCE_CHARS = 2**20
MAX_PROMPT_CHARS = 32 * 2**20
TOKENISED_CHARS = 2**18  # of a text that no context holds, and which is counted nevertheless

# Grammars
MAX_GRAMMAR_CHARS = 2**20
MAX_GRAMMAR_DEPTH = 64  # of a schema, or of brackets in a grammar
MAX_GRAMMAR_RULES = 2000
MAX_GRAMMAR_PARTS = 2**15  # values of a schema, or words and marks of a grammar: reading them keeps streams waiting
MAX_REGEX_CHARS = 4096
MAX_LARK_CHARS = 16_384  # of a grammar that becomes a regular expression
MAX_GRAMMAR_STEPS = 100_000  # through schemas that are joined, beside some for each value
MAX_INTERSECTED = 8  # patterns one string has to match at once; compiling takes twice as long with each
MAX_CHOICES = 10_000  # of a list, or of an enum
MAX_STRUCTURAL_TAGS = 256
GRAMMAR_TIMEOUT_S = 2.0  # to compile one
GRAMMAR_REPLAY_S = 0.1  # more, for each token that a matcher has to take again
GRAMMAR_QUEUE_S = 30.0  # that a grammar may wait for others to be compiled
GRAMMAR_THREADS = 2
MAX_COMPILED_GRAMMARS = 512
MAX_COMPILED_BYTES = 256 * 2**20  # estimated

# Checkpoints
MAX_HEADER_JSON_BYTES = 100 * 2**20
MAX_GGUF_STRING_BYTES = 64 * 2**20
MAX_GGUF_ARRAY_ITEMS = 2**24
MAX_GGUF_KEYS = 2**16
MAX_TENSORS = 2**20
MAX_TENSOR_NAME_CHARS = 512  # they are matched with expressions whose time is no more than their square
MAX_TENSOR_DIMS = 8

# Models that are loaded from elsewhere
MAX_MANIFEST_BYTES = 4 * 2**20
MAX_MANIFEST_LAYERS = 4096
MAX_REPOSITORY_FILES = 20_000
MAX_ANSWER_BYTES = 64 * 2**20  # of a server's list of files
MAX_LAYER_TEXT_BYTES = 2**20  # a template, a system message, a licence, parameters
MAX_LAYER_TEXTS = 16  # of one model
MAX_LAYER_TEXTS_BYTES = 4 * 2**20  # all of them
MAX_NAME_CHARS = 512
MAX_MODEL_FILE_BYTES = 2**44
PART_BYTES = 32 * 2**20  # of a file that is loaded in ranges
DOWNLOAD_STREAMS = 4
MAX_REDIRECTS = 10
PROMPT_LOGIT_ROWS = 128  # logits of scored prompts are computed that many at a time: [128, vocab] float32
