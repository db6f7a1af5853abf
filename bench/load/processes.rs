//! What other processes use, from `/proc`.

use anyhow::{Context as _, Result};
use serde_json::{Map, Value};

/// Clock ticks per second in `/proc/PID/stat`: fixed for programs on Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Parses `name=pid`.
pub fn watched(text: &str) -> Result<(String, u32)> {
    let (name, pid) = text.split_once('=').context("expected NAME=PID")?;
    Ok((name.to_owned(), pid.parse()?))
}

/// CPU time and memory of the watched processes at one moment.
pub struct Usage(Vec<(String, f64, u64)>);

impl Usage {
    /// Looks at the processes.
    pub fn of(watched: &[(String, u32)]) -> Result<Usage> {
        let one = |(name, pid): &(String, u32)| {
            let stat =
                std::fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("{name} is gone"))?;
            // The second field is the name in parentheses, which may hold anything.
            let fields: Vec<&str> = stat.rsplit_once(')').context("stat")?.1.split_whitespace().collect();
            let ticks = |index: usize| -> Result<f64> { Ok(fields.get(index).context("stat")?.parse()?) };
            let seconds = (ticks(11)? + ticks(12)?) / TICKS_PER_SECOND;
            let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
            let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
            let resident = resident.trim().trim_end_matches(" kB").parse()?;
            Ok((name.clone(), seconds, resident))
        };
        watched.iter().map(one).collect::<Result<_>>().map(Usage)
    }

    /// CPU-seconds since `before`, for each of `units` units of work.
    pub fn cpu_since(&self, before: &Usage, units: f64) -> Value {
        let used = self.0.iter().zip(&before.0).map(|((name, now, _), (_, then, _))| {
            let seconds = ((now - then) / units * 1000.0).round() / 1000.0;
            (name.clone(), Value::from(seconds))
        });
        Value::Object(used.collect::<Map<_, _>>())
    }

    /// Resident memory, KiB.
    pub fn resident(&self) -> Value {
        Value::Object(self.0.iter().map(|(name, _, resident)| (name.clone(), Value::from(*resident))).collect())
    }
}
