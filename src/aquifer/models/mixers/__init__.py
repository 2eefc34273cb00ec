"""Mixers with recurrent state, which layers have instead of attention or beside it."""
