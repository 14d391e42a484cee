"""Layer 1: functions on tensors, without state."""
