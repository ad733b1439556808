"""How many tokens to draft: costs, acceptance, and the controller that chooses K."""
