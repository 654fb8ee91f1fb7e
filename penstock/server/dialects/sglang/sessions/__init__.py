"""SGLang's sessions: requests that send what is new, of which the server holds what came before."""
