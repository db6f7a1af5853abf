//! ext_proc
