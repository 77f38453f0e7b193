"""Who of the waiting requests joins the batch next."""
