"""OpenAI's moderations, by a guard model or a classifier that is served."""
