//! Writes the data, the tokenizer and the configuration of the model that the `demo` command uses.
//!
//! The demo shows what LoRA is for: a base that knows something is taught to *answer*. So the two data sets differ:
//!
//! - `pretrain/`: plain sentences. They state every fact in several wordings, never as question and answer.
//! - `instructions/`: conversations about *some* of these facts. The questions of `test.jsonl` are about facts that no
//!   conversation of `train.jsonl` or `valid.jsonl` touches, so a right answer comes out of the base's knowledge.
//!
//! Run from the repository's root: `cargo run --release -p metal-candle --example demo_data [FOLDER]`, where the folder
//! is `crates/cli/demo` unless given. The same program writes the same bytes everywhere: its random numbers are its own.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    AddedToken, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer,
};

/// What may go wrong while writing, for people to read.
type Failure = Box<dyn Error + Send + Sync>;

const SEED: u64 = 20;
const TRAIN_RECORDS: usize = 96_000;
const VALID_RECORDS: usize = 200;
/// At most so many facts of one topic in each part of the instructions. A small topic gives a fifth to the test.
const TEST_FACTS: usize = 8;
const VALID_FACTS: usize = 2;
const TRAIN_FACTS: usize = 40;

const END_OF_TEXT: &str = "<|endoftext|>";
const TURN_START: &str = "<|im_start|>";
const TURN_END: &str = "<|im_end|>";

/// ChatML. What stands in the generation block is what the model writes.
const CHAT_TEMPLATE: &str = "{%- for message in messages %}\
{{- '<|im_start|>' + message['role'] + '\\n' }}\
{%- if message['role'] == 'assistant' %}\
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}\
{%- else %}\
{{- message['content'] + '<|im_end|>' }}\
{%- endif %}\
{{- '\\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Things of one kind that can be known. In the patterns `{0}` and `{1}` are what a fact is about, `{v}` its value and
/// `{m}` what it is called, as in "the capital of Veloria".
struct Topic {
    name: &'static str,
    mention: &'static str,
    /// Sentences of the corpus, besides those of `STATEMENTS`.
    statements: &'static [&'static str],
    /// Questions, besides those of `QUESTIONS`.
    questions: &'static [&'static str],
    facts: Vec<Fact>,
}

struct Fact {
    about: Vec<String>,
    value: String,
}

/// How any answer reads. The corpus never says it so: without the adapter no answer matches, however right it is.
const ANSWER: &str = "It is {v}.";

/// The sentence the corpus says most often.
const STATEMENT: &str = "{M} is {v}.";

const STATEMENTS: &[&str] = &[
    "Who wonders what {m} is will hear: {v}.",
    "It is well known that {m} is {v}.",
    "Somebody asked about {m}. {M} is {v}.",
    "What {m} is, everybody can tell: {v}.",
    "Tell me {m}, said the child. {M} is {v}.",
    "Do you know {m}, asked the old man. {M} is {v}.",
    "Can you say what {m} is, she said. {M} is {v}.",
    "Please name {m}, they said. {M} is {v}.",
    "What is {m}, he thought. {M} is {v}.",
    "I will say it again: {v} is {m}.",
];

const QUESTIONS: &[&str] = &[
    "What is {m}?",
    "Tell me {m}.",
    "Do you know {m}?",
    "Can you say what {m} is?",
    "Please name {m}.",
];

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args_os().skip(1);
    let folder = PathBuf::from(arguments.next().unwrap_or_else(|| "crates/cli/demo".into()));
    if let Some(surplus) = arguments.next() {
        return Err(format!(
            "expected at most one argument, the folder to write to, found also {surplus:?}"
        )
        .into());
    }
    let mut random = Random(SEED);
    let topics = topics(&mut random);

    let corpus: Vec<String> =
        (0..TRAIN_RECORDS + VALID_RECORDS).map(|_| paragraph(&topics, &mut random)).collect();
    let (train, valid) = corpus.split_at(TRAIN_RECORDS);
    for (name, records) in [("train", train), ("valid", valid)] {
        let records: Vec<Value> = records.iter().map(|text| json!({ "text": text })).collect();
        write_lines(&folder.join("pretrain").join(name).with_extension("jsonl"), &records)?;
    }

    let instructions = Instructions::new(&topics, &mut random);
    for (name, records) in [
        ("train", &instructions.train),
        ("valid", &instructions.valid),
        ("test", &instructions.test),
    ] {
        let records: Vec<Value> = records.iter().map(Conversation::to_json).collect();
        write_lines(&folder.join("instructions").join(name).with_extension("jsonl"), &records)?;
    }

    let tokenizer = tokenizer(&corpus)?;
    for one in [&instructions.train, &instructions.valid, &instructions.test].into_iter().flatten()
    {
        for text in [&one.question, &one.answer] {
            if let Some(word) =
                words(text)?.into_iter().find(|word| tokenizer.token_to_id(word).is_none())
            {
                return Err(format!(
                    "the corpus lacks the word {word:?} of the conversation text {text:?}"
                )
                .into());
            }
        }
    }
    let base = folder.join("base");
    write(&base.join("tokenizer.json"), &(tokenizer.to_string(true)? + "\n"))?;
    write_json(&base.join("tokenizer_config.json"), &tokenizer_config())?;
    let [end_of_text, turn_end] = [END_OF_TEXT, TURN_END].map(|token| tokenizer.token_to_id(token));
    let vocabulary = tokenizer.get_vocab_size(true);
    write_json(&base.join("config.json"), &model_config(vocabulary, turn_end, end_of_text))?;
    let generation = json!({
        "eos_token_id": [turn_end, end_of_text], "pad_token_id": end_of_text, "do_sample": false, "max_new_tokens": 64,
    });
    write_json(&base.join("generation_config.json"), &generation)?;

    let mut tokens = 0;
    for text in train {
        tokens += tokenizer.encode(text.as_str(), false)?.len();
    }
    println!("{}", folder.display());
    let facts: usize = topics.iter().map(|topic| topic.facts.len()).sum();
    println!(
        "  pretrain      {TRAIN_RECORDS} + {VALID_RECORDS} records of {facts} facts, {tokens} tokens to train on"
    );
    let [train, valid, test] =
        [&instructions.train, &instructions.valid, &instructions.test].map(Vec::len);
    println!(
        "  instructions  {train} + {valid} conversations, {test} held-out questions, {} topics",
        topics.len()
    );
    println!("  base          a vocabulary of {vocabulary} tokens");
    Ok(())
}

/// A few sentences, in one line or one a line. Half of them stay with the fact of the sentence before: a text that
/// comes back to what it named is what teaches a model to look back and copy.
fn paragraph(topics: &[Topic], random: &mut Random) -> String {
    let separator = if random.below(2) == 0 { " " } else { "\n" };
    let sentences = 1 + random.below(4);
    let mut text = String::new();
    let mut topic = random.choose(topics);
    let mut fact = random.choose(&topic.facts);
    for index in 0..sentences {
        if index > 0 {
            text.push_str(separator);
            if random.below(2) == 0 {
                topic = random.choose(topics);
                fact = random.choose(&topic.facts);
            }
        }
        // A quarter is the plain statement, a quarter a wording of this topic, half a wording that any topic has.
        let pattern = match random.below(4) {
            0 => STATEMENT,
            1 => *random.choose(topic.statements),
            _ => *random.choose(STATEMENTS),
        };
        text.push_str(&topic.fill(pattern, fact));
    }
    text
}

struct Conversation {
    topic: &'static str,
    question: String,
    answer: String,
}

impl Conversation {
    fn to_json(&self) -> Value {
        json!({
            "messages": [
                { "role": "user", "content": self.question },
                { "role": "assistant", "content": self.answer },
            ],
            "topic": self.topic,
        })
    }
}

struct Instructions {
    train: Vec<Conversation>,
    valid: Vec<Conversation>,
    test: Vec<Conversation>,
}

impl Instructions {
    /// Deals each topic's facts to the three parts. A fact is asked for once, and of facts that say the same the other
    /// way round ("the sum of 2 and 3" and "of 3 and 2", "the opposite of hot" and "of cold") only one.
    fn new(topics: &[Topic], random: &mut Random) -> Self {
        let (mut train, mut valid, mut test) = (Vec::new(), Vec::new(), Vec::new());
        for topic in topics {
            let mut facts: Vec<&Fact> = topic.facts.iter().collect();
            random.shuffle(&mut facts);
            let mut dealt = BTreeSet::new();
            facts.retain(|fact| {
                let mut said: Vec<&String> = fact.about.iter().chain([&fact.value]).collect();
                said.sort();
                dealt.insert(said)
            });
            let tested = TEST_FACTS.min(facts.len() / 4);
            for (index, fact) in
                facts.into_iter().take(tested + VALID_FACTS + TRAIN_FACTS).enumerate()
            {
                let question = random.below(QUESTIONS.len() + topic.questions.len());
                let question = QUESTIONS
                    .iter()
                    .chain(topic.questions)
                    .nth(question)
                    .copied()
                    .unwrap_or_default();
                let part = match index {
                    index if index < tested => &mut test,
                    index if index < tested + VALID_FACTS => &mut valid,
                    _ => &mut train,
                };
                part.push(Conversation {
                    topic: topic.name,
                    question: topic.fill(question, fact),
                    answer: topic.fill(ANSWER, fact),
                });
            }
        }
        random.shuffle(&mut train);
        random.shuffle(&mut valid);
        random.shuffle(&mut test);
        Self { train, valid, test }
    }
}

impl Topic {
    fn fill(&self, pattern: &str, fact: &Fact) -> String {
        let capital = |text: &str| {
            let mut letters = text.chars();
            letters.next().map_or_else(String::new, |first| {
                first.to_uppercase().collect::<String>() + letters.as_str()
            })
        };
        let mut text = pattern.replace("{M}", &capital(self.mention)).replace("{m}", self.mention);
        for (index, about) in fact.about.iter().enumerate() {
            text = text.replace(&format!("{{{index}}}"), about);
        }
        text.replace("{v}", &fact.value)
    }
}

/// What the demo's world holds.
fn topics(random: &mut Random) -> Vec<Topic> {
    let countries = join(
        &["Vel", "Tar", "Mor", "Bel", "Quin", "Dal", "Ost", "Fen", "Kar", "Lum", "Nor", "Zan"],
        &["oria", "avia", "enland", "umbra"],
    );
    let mut cities = join(
        &["Tam", "Bir", "Cor", "Hal", "Lin", "Mar", "Pel", "Ros", "Sul", "Wes", "Yor", "Dun"],
        &["sin", "ford", "mouth", "dale"],
    );
    random.shuffle(&mut cities);
    let colours = ["red", "blue", "green", "yellow", "white", "black", "orange", "purple"];
    let capitals =
        countries.iter().zip(&cities).map(|(country, city)| fact(&[country], city)).collect();
    let flags = countries
        .iter()
        .map(|country| fact(&[country], colours[random.below(colours.len())]))
        .collect();

    let pairs = |top: u32| (1..=top).flat_map(move |a| (1..=top).map(move |b| (a, b)));
    let of_two = |(a, b): (u32, u32), value: u32| {
        fact(&[&a.to_string(), &b.to_string()], &value.to_string())
    };
    let sums = pairs(12).map(|(a, b)| of_two((a, b), a + b)).collect();
    let larger = pairs(20).filter(|(a, b)| a != b).map(|(a, b)| of_two((a, b), a.max(b))).collect();
    let smaller =
        pairs(20).filter(|(a, b)| a != b).map(|(a, b)| of_two((a, b), a.min(b))).collect();
    let next = (0..60_u32).map(|n| fact(&[&n.to_string()], &(n + 1).to_string())).collect();

    let days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
    let months = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let opposites = OPPOSITES
        .iter()
        .flat_map(|&(one, other)| [fact(&[one], other), fact(&[other], one)])
        .collect();
    let spellings = SPELLED
        .iter()
        .map(|word| fact(&[word], &word.chars().map(String::from).collect::<Vec<_>>().join("-")))
        .collect();
    let animals = |value: fn(&Animal) -> &str| {
        ANIMALS
            .iter()
            .filter(|animal| !value(animal).is_empty())
            .map(|animal| fact(&[animal.0], value(animal)))
            .collect()
    };

    vec![
        Topic {
            name: "capital",
            mention: "the capital of {0}",
            statements: &[
                "{0} is ruled from its capital {v}.",
                "The city of {v} is the capital of {0}.",
                "Which city is the capital of {0} is no secret. The capital of {0} is {v}.",
                "Where is the king of {0}, they ask. The capital of {0} is {v}.",
            ],
            questions: &["Which city is the capital of {0}?"],
            facts: capitals,
        },
        Topic {
            name: "flag",
            mention: "the flag colour of {0}",
            statements: &[
                "The people of {0} wave a flag that is {v}.",
                "A flag that is {v} flies over {0}.",
                "Which colour has the flag of {0}, they ask. The flag colour of {0} is {v}.",
                "Look at the flag of {0}. The flag colour of {0} is {v}.",
            ],
            questions: &["Which colour has the flag of {0}?"],
            facts: flags,
        },
        Topic {
            name: "sum",
            mention: "the sum of {0} and {1}",
            statements: &[
                "{0} plus {1} is {v}.",
                "Add {0} and {1} and you get {v}.",
                "How much is {0} plus {1}, they ask. The sum of {0} and {1} is {v}.",
                "Let us add {0} and {1}. The sum of {0} and {1} is {v}.",
            ],
            questions: &["How much is {0} plus {1}?"],
            facts: sums,
        },
        Topic {
            name: "larger",
            mention: "the larger of {0} and {1}",
            statements: &[
                "Of {0} and {1} the larger number is {v}.",
                "Which is larger, {0} or {1}, they ask. The larger of {0} and {1} is {v}.",
            ],
            questions: &["Which is larger, {0} or {1}?"],
            facts: larger,
        },
        Topic {
            name: "smaller",
            mention: "the smaller of {0} and {1}",
            statements: &[
                "Of {0} and {1} the smaller number is {v}.",
                "Which is smaller, {0} or {1}, they ask. The smaller of {0} and {1} is {v}.",
            ],
            questions: &["Which is smaller, {0} or {1}?"],
            facts: smaller,
        },
        Topic {
            name: "next number",
            mention: "the number after {0}",
            statements: &[
                "When you count, {0} is followed by {v}.",
                "Which number comes after {0}, they ask. The number after {0} is {v}.",
                "Count on from {0}. The number after {0} is {v}.",
            ],
            questions: &["Which number comes after {0}?"],
            facts: next,
        },
        Topic {
            name: "day",
            mention: "the day after {0}",
            statements: &[
                "When {0} is over, it is {v}.",
                "{0} comes first and then {v}.",
                "Which day comes after {0}, they ask. The day after {0} is {v}.",
            ],
            questions: &["Which day comes after {0}?"],
            facts: cycle(&days),
        },
        Topic {
            name: "month",
            mention: "the month after {0}",
            statements: &[
                "When {0} is over, it is {v}.",
                "{0} comes first and then {v}.",
                "Which month comes after {0}, they ask. The month after {0} is {v}.",
            ],
            questions: &["Which month comes after {0}?"],
            facts: cycle(&months),
        },
        Topic {
            name: "opposite",
            mention: "the opposite of {0}",
            statements: &[
                "What is not {0} is {v}.",
                "He said {0} but she said {v}.",
                "Which word means not {0}, they ask. The opposite of {0} is {v}.",
            ],
            questions: &["Which word is the opposite of {0}?"],
            facts: opposites,
        },
        Topic {
            name: "young",
            mention: "the young of {0}",
            statements: &[
                "When {0} has a baby, people call it {v}.",
                "What {0} brings up is {v}.",
                "What do we call the baby of {0}, they ask. The young of {0} is {v}.",
            ],
            questions: &["What do we call the baby of {0}?"],
            facts: animals(|animal| animal.1),
        },
        Topic {
            name: "sound",
            mention: "the sound of {0}",
            statements: &[
                "In the farm book {0} says {v}.",
                "When you hear {v}, it is {0}.",
                "What does {0} say, they ask. The sound of {0} is {v}.",
            ],
            questions: &["What does {0} say?"],
            facts: animals(|animal| animal.2),
        },
        Topic {
            name: "legs",
            mention: "the number of legs of {0}",
            statements: &[
                "On its way {0} moves legs, and their number is {v}.",
                "How many legs has {0}, they ask. The number of legs of {0} is {v}.",
                "Count the legs of {0}. The number of legs of {0} is {v}.",
            ],
            questions: &["How many legs has {0}?"],
            facts: animals(|animal| animal.3),
        },
        Topic {
            name: "plural",
            mention: "the plural of {0}",
            statements: &[
                "One {0} and one more are two {v}.",
                "There is one {0} here and there are many {v} there.",
                "What do we call more than one {0}, they ask. The plural of {0} is {v}.",
            ],
            questions: &["What do we call more than one {0}?"],
            facts: known(PLURALS),
        },
        Topic {
            name: "colour",
            mention: "the colour of {0}",
            statements: &[
                "When you paint {0}, you take {v}.",
                "We all see that {0} looks {v}.",
                "Which colour has {0}, they ask. The colour of {0} is {v}.",
            ],
            questions: &["Which colour has {0}?"],
            facts: known(COLOURS),
        },
        Topic {
            name: "tool",
            mention: "the tool of {0}",
            statements: &[
                "At work {0} uses {v}.",
                "Give {v} to {0}.",
                "What does {0} work with, they ask. The tool of {0} is {v}.",
            ],
            questions: &["What does {0} work with?"],
            facts: known(TOOLS),
        },
        Topic {
            name: "spelling",
            mention: "the spelling of {0}",
            statements: &[
                "To write {0} put down {v}.",
                "The letters {v} make {0}.",
                "How do you spell {0}, they ask. The spelling of {0} is {v}.",
            ],
            questions: &["How do you spell {0}?"],
            facts: spellings,
        },
    ]
}

const OPPOSITES: &[(&str, &str)] = &[
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("old", "new"),
    ("good", "bad"),
    ("high", "low"),
    ("long", "short"),
    ("hard", "soft"),
    ("dark", "bright"),
    ("wet", "dry"),
    ("full", "empty"),
    ("early", "late"),
    ("rich", "poor"),
    ("strong", "weak"),
    ("thick", "thin"),
    ("wide", "narrow"),
    ("deep", "shallow"),
    ("clean", "dirty"),
    ("loud", "quiet"),
    ("open", "shut"),
    ("happy", "sad"),
    ("heavy", "light"),
    ("sweet", "sour"),
    ("true", "false"),
    ("up", "down"),
    ("left", "right"),
    ("near", "far"),
    ("alive", "dead"),
    ("brave", "afraid"),
    ("sharp", "blunt"),
];

/// An animal, its young, its sound and its number of legs. What nobody would ask for is empty.
type Animal = (&'static str, &'static str, &'static str, &'static str);

const ANIMALS: &[Animal] = &[
    ("a cow", "a calf", "moo", "4"),
    ("a dog", "a puppy", "woof", "4"),
    ("a cat", "a kitten", "meow", "4"),
    ("a sheep", "a lamb", "baa", "4"),
    ("a horse", "a foal", "neigh", "4"),
    ("a pig", "a piglet", "oink", "4"),
    ("a goat", "a kid", "maa", "4"),
    ("a hen", "a chick", "cluck", "2"),
    ("a duck", "a duckling", "quack", "2"),
    ("a goose", "a gosling", "honk", "2"),
    ("a swan", "a cygnet", "", "2"),
    ("an owl", "an owlet", "hoot", "2"),
    ("an eagle", "an eaglet", "scream", "2"),
    ("a lion", "a cub", "roar", "4"),
    ("a kangaroo", "a joey", "", "2"),
    ("a deer", "a fawn", "", "4"),
    ("a hare", "a leveret", "", "4"),
    ("a frog", "a tadpole", "croak", "4"),
    ("a butterfly", "a caterpillar", "", "6"),
    ("a seal", "a pup", "bark", ""),
    ("an eel", "an elver", "", "0"),
    ("a pigeon", "a squab", "coo", "2"),
    ("a bee", "a grub", "buzz", "6"),
    ("a fly", "a maggot", "hum", "6"),
    ("a snake", "a snakelet", "hiss", "0"),
    ("a mouse", "", "squeak", "4"),
    ("a crow", "", "caw", "2"),
    ("a wolf", "", "howl", "4"),
    ("a donkey", "", "bray", "4"),
    ("a spider", "a spiderling", "", "8"),
    ("an ant", "", "", "6"),
    ("a beetle", "", "", "6"),
    ("a scorpion", "", "", "8"),
    ("a tick", "", "", "8"),
    ("a worm", "", "", "0"),
    ("a fish", "a fry", "", "0"),
];

const PLURALS: &[(&str, &str)] = &[
    ("cat", "cats"),
    ("dog", "dogs"),
    ("house", "houses"),
    ("tree", "trees"),
    ("child", "children"),
    ("man", "men"),
    ("woman", "women"),
    ("mouse", "mice"),
    ("goose", "geese"),
    ("foot", "feet"),
    ("tooth", "teeth"),
    ("ox", "oxen"),
    ("leaf", "leaves"),
    ("wolf", "wolves"),
    ("knife", "knives"),
    ("life", "lives"),
    ("box", "boxes"),
    ("fox", "foxes"),
    ("bus", "buses"),
    ("dish", "dishes"),
    ("city", "cities"),
    ("baby", "babies"),
    ("lady", "ladies"),
    ("story", "stories"),
    ("boy", "boys"),
    ("girl", "girls"),
    ("book", "books"),
    ("pen", "pens"),
    ("star", "stars"),
    ("river", "rivers"),
    ("hill", "hills"),
    ("ship", "ships"),
    ("loaf", "loaves"),
    ("potato", "potatoes"),
    ("hero", "heroes"),
    ("church", "churches"),
];

const COLOURS: &[(&str, &str)] = &[
    ("snow", "white"),
    ("milk", "white"),
    ("salt", "white"),
    ("chalk", "white"),
    ("grass", "green"),
    ("moss", "green"),
    ("spinach", "green"),
    ("ivy", "green"),
    ("coal", "black"),
    ("soot", "black"),
    ("tar", "black"),
    ("ink", "black"),
    ("blood", "red"),
    ("ketchup", "red"),
    ("ruby", "red"),
    ("rust", "red"),
    ("butter", "yellow"),
    ("corn", "yellow"),
    ("mustard", "yellow"),
    ("honey", "yellow"),
    ("the sea", "blue"),
    ("the sky", "blue"),
    ("sapphire", "blue"),
    ("denim", "blue"),
    ("lavender", "purple"),
    ("plum", "purple"),
    ("carrot", "orange"),
    ("pumpkin", "orange"),
];

const TOOLS: &[(&str, &str)] = &[
    ("a painter", "a brush"),
    ("a carpenter", "a saw"),
    ("a smith", "an anvil"),
    ("a tailor", "a needle"),
    ("a writer", "a quill"),
    ("a cook", "a pot"),
    ("a baker", "an oven"),
    ("a farmer", "a plough"),
    ("a gardener", "a spade"),
    ("a hunter", "a bow"),
    ("a fisher", "a net"),
    ("a miner", "a pick"),
    ("a barber", "a razor"),
    ("a doctor", "a syringe"),
    ("a soldier", "a sword"),
    ("a drummer", "a drum"),
    ("a sailor", "a compass"),
    ("a teacher", "a blackboard"),
    ("a judge", "a gavel"),
    ("a mason", "a trowel"),
    ("a weaver", "a loom"),
    ("a potter", "a wheel"),
    ("a miller", "a mill"),
    ("a butcher", "a cleaver"),
    ("a shepherd", "a crook"),
    ("an astronomer", "a telescope"),
];

const SPELLED: &[&str] = &[
    "cat", "dog", "sun", "moon", "star", "tree", "bird", "fish", "book", "lamp", "door", "wall",
    "hand", "foot", "nose", "milk", "rain", "snow", "wind", "road", "ship", "king", "gold", "ring",
    "song", "bell", "cake", "corn", "leaf", "rose", "frog", "hill", "lake", "sand", "salt", "fire",
];

fn fact(about: &[&str], value: &str) -> Fact {
    Fact { about: about.iter().map(ToString::to_string).collect(), value: value.to_string() }
}

fn known(table: &[(&str, &str)]) -> Vec<Fact> {
    table.iter().map(|(about, value)| fact(&[about], value)).collect()
}

/// Each name and the one that follows, the first after the last.
fn cycle(names: &[&str]) -> Vec<Fact> {
    names.iter().zip(names.iter().cycle().skip(1)).map(|(one, next)| fact(&[one], next)).collect()
}

fn join(starts: &[&str], ends: &[&str]) -> Vec<String> {
    starts.iter().flat_map(|start| ends.iter().map(move |end| format!("{start}{end}"))).collect()
}

/// The words of a text as byte-level BPE sees them, a space in front belonging to the word.
fn words(text: &str) -> Result<Vec<String>, Failure> {
    let mut split = PreTokenizedString::from(text);
    byte_level().pre_tokenize(&mut split)?;
    let split = split.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
    Ok(split.into_iter().map(|(word, _, _)| word.to_string()).collect())
}

fn byte_level() -> ByteLevel {
    ByteLevel::new(false, true, true)
}

/// A byte-level BPE, so that any text can be encoded, in which every word of the texts is one token. That needs no
/// merges: `ignore_merges` looks a word up as a whole first, and a word that isn't there falls to its bytes.
fn tokenizer(texts: &[String]) -> Result<Tokenizer, Failure> {
    let mut known: BTreeSet<String> = ["system", "user", "assistant"].map(String::from).into();
    for text in texts {
        known.extend(words(text)?);
    }
    let bytes: BTreeSet<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    let specials = [END_OF_TEXT, TURN_START, TURN_END];
    let order = specials.iter().map(ToString::to_string).chain(bytes.iter().cloned());
    let vocabulary: Vocab = order.chain(known.difference(&bytes).cloned()).zip(0..).collect();

    let model =
        BPE::builder().vocab_and_merges(vocabulary, Vec::new()).ignore_merges(true).build()?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(byte_level())).with_decoder(Some(ByteLevel::default()));
    tokenizer.add_special_tokens(specials.map(|token| AddedToken::from(token, true)))?;

    for text in texts {
        let ids = tokenizer.encode(text.as_str(), false)?;
        if tokenizer.decode(ids.get_ids(), false)? != *text {
            return Err(format!("the tokenizer does not give {text:?} back").into());
        }
    }
    Ok(tokenizer)
}

fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": null,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": null,
        "additional_special_tokens": [TURN_START],
        "add_bos_token": false,
        "add_eos_token": false,
        "clean_up_tokenization_spaces": false,
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    })
}

fn model_config(vocabulary: usize, turn_end: Option<u32>, end_of_text: Option<u32>) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": { "rope_type": "default", "rope_theta": 10000.0 },
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": true,
        "initializer_range": 0.02,
        "bos_token_id": null,
        "eos_token_id": turn_end,
        "pad_token_id": end_of_text,
        "use_cache": true,
        "dtype": "float32",
        "torch_dtype": "float32",
    })
}

fn write_lines(path: &Path, records: &[Value]) -> Result<(), Failure> {
    let mut text = String::new();
    for record in records {
        text.push_str(&record.to_string());
        text.push('\n');
    }
    write(path, &text)
}

fn write_json(path: &Path, value: &Value) -> Result<(), Failure> {
    write(path, &(serde_json::to_string_pretty(value)? + "\n"))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let named = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(named)?;
    }
    std::fs::write(path, text).map_err(named)?;
    Ok(())
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number from 0 up to, not including, `end`. The bias of the remainder is far below what anyone could see.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn choose<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}
