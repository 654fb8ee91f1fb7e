"""OpenAI's Responses API: an answer as an object that is kept, continued, followed and cancelled."""
