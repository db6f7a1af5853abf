//! A child process: its logs in a temporary directory, signals, and its end.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use tempfile::TempDir;

use super::{deadline, eventually};

/// Lines of each log that a failing test prints.
const LOG_TAIL: usize = 80;

/// A running child. Dropping it kills it; if the test is failing, the end of its logs is printed first.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Mutex<Child>,
    directory: TempDir,
    _going: deadline::Going,
}

/// A program found by [`tool`], its arguments and environment.
#[derive(Debug)]
pub struct Start {
    name: String,
    command: Command,
    directory: TempDir,
}

impl Start {
    /// Prepares `program` with an environment that holds nothing of the caller's but `PATH` and `HOME`: variables of
    /// a developer's shell must not configure what is tested.
    pub fn new(name: &str, program: impl AsRef<OsStr>) -> Start {
        let directory = tempfile::Builder::new().prefix(&format!("{name}-")).tempdir().expect("temporary directory");
        let mut command = Command::new(program);
        command.env_clear();
        for inherited in ["PATH", "HOME", "LLVM_PROFILE_FILE"] {
            if let Some(value) = std::env::var_os(inherited) {
                command.env(inherited, value);
            }
        }
        command.env("RUST_BACKTRACE", "1").stdin(Stdio::null()).current_dir(directory.path());
        Start { name: name.to_owned(), command, directory }
    }

    /// The directory in which it will run.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Adds an argument.
    pub fn arg(&mut self, argument: impl AsRef<OsStr>) -> &mut Start {
        self.command.arg(argument);
        self
    }

    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(&mut self, arguments: impl IntoIterator<Item = A>) -> &mut Start {
        self.command.args(arguments);
        self
    }

    /// Sets a variable.
    pub fn env(&mut self, name: &str, value: &str) -> &mut Start {
        self.command.env(name, value);
        self
    }

    /// Starts it with its output in `stdout.log` and `stderr.log`.
    pub fn spawn(mut self) -> Process {
        let log = |file: &str| File::create(self.directory.path().join(file)).expect("log file");
        self.command.stdout(log("stdout.log")).stderr(log("stderr.log"));
        let child = self.command.spawn().unwrap_or_else(|error| panic!("{}: cannot start: {error}", self.name));
        let going = deadline::process(&self.name);
        Process { name: self.name, child: Mutex::new(child), directory: self.directory, _going: going }
    }
}

impl Process {
    /// The directory in which it runs.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.lock().expect("child").id()
    }

    /// All that it wrote to standard output.
    pub fn stdout(&self) -> String {
        self.read("stdout.log")
    }

    /// All that it wrote to standard error.
    pub fn stderr(&self) -> String {
        self.read("stderr.log")
    }

    fn read(&self, file: &str) -> String {
        let bytes = std::fs::read(self.directory.path().join(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Its exit status, if it has ended.
    pub fn status(&self) -> Option<ExitStatus> {
        self.child.lock().expect("child").try_wait().expect("wait for child")
    }

    /// Waits for its end.
    pub async fn exited(&self, limit: Duration) -> ExitStatus {
        eventually(limit, &format!("{} exits", self.name), async || self.status()).await
    }

    /// Sends a signal (`TERM`, `KILL`, `STOP`, `CONT`) unless it has ended.
    pub fn signal(&self, signal: &str) {
        let mut child = self.child.lock().expect("child");
        if child.try_wait().expect("wait for child").is_none() {
            let sent = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).status();
            assert!(sent.expect("run kill").success(), "{}: signal {signal}", self.name);
        }
    }

    /// SIGKILL, and waits until the process is gone.
    pub fn kill(&self) {
        let mut child = self.child.lock().expect("child");
        // Fails only for a child that has already been waited for.
        let _ = child.kill();
        child.wait().expect("wait for child");
    }

    /// The ends of both logs, for messages.
    pub fn logs(&self) -> String {
        let tail = |text: String| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(LOG_TAIL)..].join("\n")
        };
        format!(
            "--- {name} stdout\n{}\n--- {name} stderr\n{}\n",
            tail(self.stdout()),
            tail(self.stderr()),
            name = self.name
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        if let Ok(child) = self.child.get_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Raises the limit of open files of this process, and so of the children that it starts from now on, to `wanted` if it
/// is lower. Panics when the machine does not allow that.
pub fn allow_open_files(wanted: usize) {
    // The shell reports the limit that it inherits, and `prlimit` can change that of its parent.
    let script =
        r#"[ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge "$1" ] || prlimit --pid "$2" --nofile="$1:""#;
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh", &wanted.to_string(), &std::process::id().to_string()]);
    let status = shell.status().expect("run sh");
    assert!(status.success(), "this test needs {wanted} open files: raise the limit (ulimit -n)");
}

/// Finds a program that tests need: the path in `variable`, else what `scripts/test.sh` put into `target/tools`, else
/// what `PATH` has.
pub fn tool(variable: &str, name: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(variable) {
        let path = PathBuf::from(path);
        assert!(path.exists(), "{variable} names {}, which does not exist", path.display());
        return path;
    }
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools/venv/bin").join(name);
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(fetched)
        .chain(std::env::split_paths(&on_path).map(|directory| directory.join(name)))
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{name} is not there: run scripts/test.sh, or set {variable}"))
}
