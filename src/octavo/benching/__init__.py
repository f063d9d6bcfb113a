"""Measuring the engine: what runs (`plan`), what is noted (`meter`, `figures`), what it could not do without (`costs`,
`roofline`, `probe`), and the whole measurement (`run`, `result`)."""
