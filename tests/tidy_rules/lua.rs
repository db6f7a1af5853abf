//! Scripts that run inside Redis say at their top what they touch and what they cost.

use super::{File, at, has_extension};

const PARTS: [&str; 5] = ["KEYS", "ARGV", "Reply", "TTL", "Cost"];

/// Every script begins with a comment that has all parts.
pub fn headers(files: &[File]) -> Vec<String> {
    let mut broken = Vec::new();
    for file in files.iter().filter(|file| has_extension(&file.path, "lua")) {
        let header: String = file.text.lines().take_while(|line| line.starts_with("--")).collect();
        let header = header.to_ascii_lowercase();
        for part in PARTS.iter().filter(|part| !header.contains(&part.to_ascii_lowercase())) {
            broken.push(at(file, 1, &format!("its header does not speak of {part}")));
        }
    }
    broken
}

#[test]
fn finds_scripts_without_header() {
    let header = "-- Adds.\n-- KEYS 1: a\n-- ARGV: none\n-- Reply: 1\n-- TTL: none\n-- Cost: O(1)\nreturn 1\n";
    assert!(headers(&[File::sample("lua/a.lua", header)]).is_empty());
    assert_eq!(headers(&[File::sample("lua/a.lua", &header.replace("-- TTL: none\n", ""))]).len(), 1);
    assert_eq!(headers(&[File::sample("lua/a.lua", &format!("local x\n{header}"))]).len(), PARTS.len());
    assert!(headers(&[File::sample("docs/a.md", "")]).is_empty());
}
