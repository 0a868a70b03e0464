"""World models: latent and action in, next latent, reward and termination out."""
