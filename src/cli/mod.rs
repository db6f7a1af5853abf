//! The command line.

mod serve;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// A gateway for LLM serving with prefill/decode disaggregation.
#[derive(Debug, Parser)]
#[command(name = "tandem", version, about)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a gateway replica: Envoy ext_proc, admin HTTP and, if asked for, an OpenAI HTTP front.
    Serve(serve::ServeArgs),
}

impl Cli {
    /// Runs the command to its end.
    pub async fn run(self) -> Result<()> {
        match self.command {
            Command::Serve(args) => serve::run(args).await,
        }
    }
}
