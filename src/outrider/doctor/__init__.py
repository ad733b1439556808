"""Will speculation help here? Checks, measured curves, and the advice that follows from them."""
