"""One model over several processes: who has which part of it. No torch here."""
