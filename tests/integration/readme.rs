//! The README's commands work as they stand. A command that nothing here knows how to try fails the test.

use std::process::Stdio;
use std::time::Duration;

use crate::harness::kube_api::KubeApi;
use crate::harness::within_time;

const README: &str = include_str!("../../README.md");
const REPLAY: &str = include_str!("../../docs/replay.md");

/// The lines of all `sh` blocks, continued lines joined.
fn commands(text: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut inside = false;
    let mut open = String::new();
    for line in text.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            line if inside => {
                let (text, more) = line.strip_suffix('\\').map_or((line, false), |text| (text, true));
                open.push_str(text.trim());
                if more {
                    open.push(' ');
                } else {
                    commands.push(std::mem::take(&mut open));
                }
            }
            _ => {}
        }
    }
    commands
}

fn tandem(arguments: &[&str]) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_tandem"));
    command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null()).kill_on_drop(true);
    command
}

async fn runs(arguments: &[&str]) -> String {
    let output = within_time(Duration::from_mins(1), "the command", tandem(arguments).output()).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

async fn serves(arguments: &[&str]) {
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    let ports = ["--grpc-bind-address", "127.0.0.1:0", "--http-bind-address", "127.0.0.1:0"];
    let mut child = tandem(&[arguments, &ports].concat()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = within_time(Duration::from_secs(30), "the first line", lines.next_line()).await.unwrap();
    assert!(line.unwrap_or_default().contains("\"event\":\"listening\""), "{arguments:?} does not serve");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_of_the_readme_works() {
    let commands = commands(README);
    assert!(commands.len() >= 5, "{commands:?}");
    for command in commands {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words.as_slice() {
            ["cargo", "run", "--", "quickstart", "--once"] => {
                let said = runs(&["quickstart", "--once"]).await;
                for part in ["data: [DONE]", "prefill leg", "decode leg", "first token", "request-id"] {
                    assert!(said.contains(part), "quickstart does not print {part}: {said}");
                }
            }
            // What is running this.
            ["scripts/test.sh"] => assert!(std::path::Path::new("scripts/test.sh").exists()),
            // Of a cluster there is only the stand-in.
            ["target/release/tandem", "serve", "--kubeconfig", _] => {
                let api = KubeApi::start().await;
                let kubeconfig = api.kubeconfig().display().to_string();
                serves(&["serve", "--kubeconfig", &kubeconfig]).await;
            }
            ["target/release/tandem", arguments @ ..] if arguments.first() == Some(&"serve") => serves(arguments).await,
            ["target/release/tandem", arguments @ ..] => {
                runs(arguments).await;
            }
            // What these start is tried by the tests of `deploy/`, without a cluster and without Docker.
            ["kubectl", "apply", "-k", folder] => {
                assert!(std::path::Path::new(folder).join("kustomization.yaml").exists(), "{folder}");
            }
            ["kubectl", "-n", "aibrix-system", "create", "secret", "generic", "aibrix-redis", ..]
            | ["kubectl", "create", "namespace", "aibrix-system"]
            // What has built the binary that is tried here.
            | ["cargo", "build", "--release"] => {}
            ["helm", "install", "tandem", chart, ..] => {
                assert!(std::path::Path::new(chart).join("Chart.yaml").exists(), "{chart}");
            }
            ["docker", "compose", "up", "--build"] => assert!(std::path::Path::new("docker-compose.yml").exists()),
            // The same request, with the same header and body, is in the interop cases.
            ["curl", "http://localhost:10000/v1/chat/completions", ..] => {
                let body = command.split("-d '").nth(1).and_then(|rest| rest.strip_suffix('\'')).unwrap();
                assert!(serde_json::from_str::<serde_json::Value>(body).is_ok(), "{body}");
            }
            _ => panic!("nothing tries this command of the README: {command}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_of_the_replay_page_works() {
    let mut runs_of_replay = 0;
    for command in commands(REPLAY) {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words.as_slice() {
            ["cargo", "run", "--", arguments @ ..] if arguments.first() == Some(&"replay") => {
                let said = runs(arguments).await;
                if arguments.contains(&"--replicas") {
                    assert!(said.contains("| one gateway | none | paced | claim |"), "{said}");
                } else {
                    assert!(said.contains("prefix_cache/load_balancing") && said.contains("least_request"), "{said}");
                }
                runs_of_replay += 1;
            }
            // Minutes, in real time.
            ["cargo", "bench", "--profile", "dev", "--bench", "rank", "--", "run"] => {}
            _ => panic!("nothing tries this command of docs/replay.md: {command}"),
        }
    }
    assert!(runs_of_replay >= 2);
}
