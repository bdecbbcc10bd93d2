"""The gateway: any model or pooled upstream behind the APIs of OpenAI and Anthropic."""
