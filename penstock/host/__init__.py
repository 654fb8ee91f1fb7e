"""Many models in one server: names, engines that come and go within a budget, and other servers. No torch."""
