"""Which sample each row belongs to."""
