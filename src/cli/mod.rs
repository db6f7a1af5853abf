//! The command line.

mod check;
#[cfg(test)]
mod claims;
#[cfg(test)]
mod migration;
mod quickstart;
mod replay;
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
    /// Lint an Envoy configuration or pod manifests, and say what will bite.
    Check(check::CheckArgs),
    /// Run a simulated inference engine.
    Sim(tandem_sim::cli::SimArgs),
    /// Run everything on this machine: simulated engines, a gateway and its HTTP front in one process.
    Quickstart(quickstart::QuickstartArgs),
    /// Compare routing policies on a trace of arrivals, in virtual time and against modelled engines.
    Replay(replay::ReplayArgs),
}

impl Cli {
    /// Runs the command to its end.
    pub async fn run(self) -> Result<()> {
        match self.command {
            Command::Serve(args) => serve::run(args).await,
            Command::Check(args) => check::run(&args),
            Command::Sim(args) => Ok(tandem_sim::cli::run(args).await?),
            Command::Quickstart(args) => quickstart::run(args).await,
            Command::Replay(args) => replay::run(&args),
        }
    }
}
