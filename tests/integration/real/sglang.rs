//! A real SGLang pair that moves KV with Mooncake over TCP, and a plain server beside it.
