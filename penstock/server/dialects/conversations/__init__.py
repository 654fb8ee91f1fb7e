"""OpenAI's Conversations API: lists of items that responses go on from and add to."""
