"""Several processes: real Ray and real gloo ranks on the CPU."""
