"""Pictures of the README, and what draws them."""
