"""Code that runs inside SGLang's own processes."""
