//! Who asks: a system prompt and tools of the size that coding agents send.

use super::observe::{CHARS_PER_TOKEN, cut, estimate};
use crate::load::rng::Rng;
use crate::replay::corpus::Corpus;
use serde_json::{Value, json};

/// A system prompt with its tools.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Persona {
    /// The system message.
    pub system: String,
    /// Tool definitions of the chat protocol; empty for a session without tools.
    pub tools: Vec<Value>,
}

/// The kinds of session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A coding agent with many tools.
    Coder,
    /// Another one, with fewer.
    Pair,
    /// An explorer that only reads.
    Explorer,
    /// A reviewer.
    Reviewer,
    /// Summarises a conversation.
    Compactor,
    /// Judges a conversation.
    Checker,
}

/// Name, what it does, and its parameters as `name: type` with `?` for optional ones.
type Tool = (&'static str, &'static str, &'static [&'static str]);

const TOOLS: [Tool; 20] = [
    (
        "read_file",
        "Returns numbered lines of a file, from an offset where the file is long.",
        &["path: string", "offset?: integer", "limit?: integer"],
    ),
    (
        "edit_file",
        "Replaces one occurrence of a text in a file by another. The old text must be unique in the file; give enough lines around it.",
        &["path: string", "old_text: string", "new_text: string"],
    ),
    (
        "bash",
        "Runs a command in a shell and returns its output and exit status. Commands that wait for input are killed after two minutes.",
        &["command: string", "timeout?: integer", "background?: boolean"],
    ),
    (
        "grep",
        "Searches file contents with a regular expression and returns path, line number and line of each match.",
        &["pattern: string", "path?: string", "glob?: string", "ignore_case?: boolean"],
    ),
    (
        "glob",
        "Lists files whose path matches a pattern, newest first.",
        &["pattern: string", "path?: string"],
    ),
    (
        "write_file",
        "Writes a whole file, creating folders as needed. Prefer edit_file for existing files.",
        &["path: string", "content: string"],
    ),
    (
        "list_directory",
        "Lists the entries of a folder with their sizes.",
        &["path: string", "depth?: integer"],
    ),
    (
        "todo_write",
        "Replaces the list of tasks of this session. Keep exactly one task in progress.",
        &["todos: array"],
    ),
    (
        "spawn_agent",
        "Starts a subagent with a task of its own. It sees none of this conversation and returns one report.",
        &["description: string", "prompt: string", "kind?: string"],
    ),
    ("web_fetch", "Fetches a page and answers a question about it.", &["url: string", "question: string"]),
    (
        "web_search",
        "Searches the web and returns titles, addresses and extracts.",
        &["query: string", "domains?: array"],
    ),
    (
        "notebook_edit",
        "Replaces, inserts or deletes a cell of a notebook.",
        &["path: string", "cell: integer", "source: string", "mode?: string"],
    ),
    ("read_output", "Returns new output of a background command.", &["id: string", "filter?: string"]),
    ("kill_command", "Ends a background command.", &["id: string"]),
    ("diagnostics", "Returns the language server's errors and warnings of a file.", &["path: string"]),
    ("definition", "Finds where a symbol is defined.", &["path: string", "line: integer", "symbol: string"]),
    ("references", "Finds where a symbol is used.", &["path: string", "line: integer", "symbol: string"]),
    (
        "rename_symbol",
        "Renames a symbol everywhere it is used.",
        &["path: string", "line: integer", "symbol: string", "new_name: string"],
    ),
    (
        "ask_user",
        "Asks the user a question with a few answers to choose from. Only when the task cannot go on otherwise.",
        &["question: string", "options: array"],
    ),
    ("finish", "Ends the session with a summary for the user.", &["summary: string"]),
];

const READ_ONLY: [&str; 6] = ["read_file", "grep", "glob", "bash", "list_directory", "finish"];

const RULES: &str = "You are a coding agent that works in a user's repository through tools. Work on the task until it is done or \
blocked, then say so.\n\n# How to work\n- Read before you write: look at the code around a change, its callers and its tests.\n- Make the \
smallest change that solves the whole problem. Follow the style of the file. Do not reformat what you do not change.\n- Run the tests that \
cover a change. A test that fails is information: find the cause, do not weaken the test.\n- Call several tools at once when they do not \
depend on each other.\n- Never run commands that delete work, publish, or change anything outside the repository without being asked.\n\n# How \
to answer\n- Short and concrete. Name files with their lines.\n- State what you did, what you checked, and what is left.\n- When something is \
uncertain, say what would settle it.\n\n";

fn tool((name, description, parameters): &Tool) -> Value {
    let mut properties = serde_json::Map::new();
    let mut required = Vec::new();
    for p in *parameters {
        let (key, kind) = p.split_once(": ").unwrap_or((p, "string"));
        let optional = key.ends_with('?');
        let key = key.trim_end_matches('?');
        let text = format!("The {} of {name}.", key.replace('_', " "));
        let mut schema = json!({ "type": kind, "description": text });
        if kind == "array" {
            schema["items"] = json!({ "type": "string" });
        }
        properties.insert(key.into(), schema);
        if !optional {
            required.push(json!(key));
        }
    }
    json!({ "type": "function", "function": {
        "name": name, "description": description,
        "parameters": { "type": "object", "properties": properties, "required": required },
    } })
}

/// Tokens of a tool list, estimated.
pub fn tools_estimate(tools: &[Value]) -> usize {
    tools.iter().map(|t| estimate(&t.to_string())).sum()
}

impl Role {
    /// Tokens of prompt and tools at full context, number of tools.
    fn size(self, rng: &mut Rng) -> (f64, usize) {
        match self {
            Role::Coder => (13_000.0, 20),
            Role::Pair => (11_000.0, 17),
            Role::Explorer => (rng.range(12_000.0, 15_000.0), 6),
            Role::Reviewer => (8_000.0, 6),
            Role::Compactor => (400.0, 0),
            Role::Checker => (300.0, 0),
        }
    }

    fn opening(self) -> &'static str {
        match self {
            Role::Coder | Role::Pair => RULES,
            Role::Explorer => {
                "You explore a repository to answer one question. You read and search; you change nothing. Finish \
                 with a report: what you found, in which files and lines, and how sure you are.\n\n"
            }
            Role::Reviewer => {
                "You review a change. Look for faults first, then for what makes the code harder to live with. \
                 Change nothing. Finish with findings in order of weight, each with file and line.\n\n"
            }
            Role::Compactor => {
                "You summarise a working session so that it can go on in a new context: the task, what was decided and \
                 why, what was changed, what is open, and the next step.\n\n"
            }
            Role::Checker => {
                "You judge whether a working session is on course. Answer with one JSON object: \
                 {\"on_course\": boolean, \"reason\": string}.\n\n"
            }
        }
    }

    /// Its prompt and tools, scaled to a share of the full context; tools are dropped from the end, but one is kept.
    pub fn persona(self, corpus: &Corpus, factor: f64, rng: &mut Rng) -> Persona {
        let (tokens, count) = self.size(rng);
        let budget = (tokens * factor).max(120.0) as usize;
        let named = |t: &&Tool| match self {
            Role::Explorer | Role::Reviewer => READ_ONLY.contains(&t.0),
            _ => true,
        };
        let mut tools: Vec<Value> = TOOLS.iter().filter(named).take(count).map(tool).collect();
        while tools.len() > 1 && tools_estimate(&tools) > budget / 2 {
            tools.pop();
        }
        let room = budget.saturating_sub(tools_estimate(&tools)).max(60);
        let mut system = self.opening().to_owned();
        // Instructions of the repository fill the rest, as agents paste them in.
        for file in corpus.files.iter().filter(|f| f.path.ends_with(".md")) {
            if estimate(&system) >= room || count == 0 {
                break;
            }
            system.push_str(&format!("# {}\n{}\n\n", file.path, file.text));
        }
        Persona { system: cut(&system, (room as f64 * CHARS_PER_TOKEN) as usize), tools }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn personas_have_their_size_at_every_context() {
        let corpus = Corpus::embedded().unwrap();
        for (role, low, high, tools) in [
            (Role::Coder, 9_000, 13_500, 20),
            (Role::Pair, 8_000, 11_500, 17),
            (Role::Explorer, 8_000, 15_500, 6),
        ] {
            let p = role.persona(&corpus, 1.0, &mut Rng::new(1));
            let size = estimate(&p.system) + tools_estimate(&p.tools);
            assert!((low..=high).contains(&size), "{role:?}: {size}");
            assert_eq!(p.tools.len(), tools);
            let small = role.persona(&corpus, 1.0 / 64.0, &mut Rng::new(1));
            let size = estimate(&small.system) + tools_estimate(&small.tools);
            assert!(size < 330 && !small.tools.is_empty(), "{role:?}: {size}");
        }
        assert!(Role::Checker.persona(&corpus, 1.0, &mut Rng::new(1)).tools.is_empty());
    }
}
