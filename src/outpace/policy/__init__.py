"""How much to draft and in which shape: costs, acceptance, and the choice between them."""
