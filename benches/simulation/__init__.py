"""A fleet of workers with caches, and routers that know more or less of them."""
