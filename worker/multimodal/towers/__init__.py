"""Vision towers compute the states of images' tokens from pixels, with the networks that optimum-intel exports."""
