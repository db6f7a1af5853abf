//! The `tandem` program: parse, build, run, exit.

use clap::Parser as _;

/// Many short-lived buffers of all sizes on many threads: measurably better served than by the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<()> {
    let cli = tandem::cli::Cli::parse();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(cli.run())
}
