"""How one model is dealt to several processes: arithmetic of ranks and shards. No torch here."""
