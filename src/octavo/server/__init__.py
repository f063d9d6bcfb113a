"""`octavo serve`: the engine behind the OpenAI API, and routes that say where memory is and why requests wait."""
