"""The APIs of KoboldAI and KoboldCpp."""
