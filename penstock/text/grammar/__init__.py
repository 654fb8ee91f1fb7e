"""Grammars as clients write them, checked and translated to the form the matchers take."""
