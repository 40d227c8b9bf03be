"""Time limit of tests."""

HANG_S = 600.0  # ends a test that hangs; on a quiet machine nothing comes near a tenth of it
