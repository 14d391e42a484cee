"""The fast way of a step: operations wait, and several are carried out in one pass over memory."""
