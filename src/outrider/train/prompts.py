"""What a chat model is asked when it writes its own training text, by category.

Passages, programs and half of the open questions come from the model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

# fmt: off
TOPICS = (
    "volcanoes", "bicycles", "the water cycle", "bees", "how bread is baked", "chess openings",
    "the moon", "coral reefs", "steam engines", "sleep", "vaccines", "jazz", "the Roman army",
    "glaciers", "a city park", "earthquakes", "solar panels", "tea", "public libraries",
    "the heart", "satellites", "wolves", "recycling", "printing", "tides", "cheese", "marathons",
    "electric cars", "deserts", "photosynthesis", "lighthouses", "a bakery", "floods",
    "the stock market", "passwords", "penguins", "painting", "how planes fly", "soil",
    "the number zero", "gardening", "antibiotics", "the eye", "bridges", "a school newspaper",
    "wind turbines", "black holes", "rice", "mountain climbing", "a family holiday",
    "job interviews", "budgets", "friendship", "a robot that learns to paint", "a lost dog",
    "a ship in a storm", "cooking", "customer complaints", "remote work", "dinosaurs", "databases",
    "sorting algorithms", "web browsers", "unit tests", "recursion", "the climate", "nutrition",
    "exercise", "music lessons", "languages", "theatre", "photography", "trains", "taxes",
    "elections", "museums", "the Silk Road", "the telephone", "radio", "Mars", "atoms", "magnets",
    "probability", "fractions", "statistics", "insurance", "a coffee shop", "a hospital",
    "a football team", "knitting", "birds", "mushrooms", "chocolate", "a birthday party",
    "a wedding speech", "an apology", "a travel plan", "a reading list", "a weekly menu",
)
TASKS = (
    "reverses a string", "checks whether a number is prime", "merges two sorted lists",
    "counts the words in a text", "finds the largest number in a list", "removes duplicates",
    "sorts records by a field", "reads a CSV file", "computes an average", "validates an email",
    "flattens a nested list", "converts temperatures", "groups words by their first letter",
)
THINGS = ("apples", "pencils", "books", "tickets", "marbles", "eggs", "cards", "coins", "shirts")
FIELDS = (
    "name, age, city", "title, author, year", "product, price, stock", "id, email, active",
    "event, date, guests", "course, teacher, room", "dish, ingredients, minutes",
)
# fmt: on
CHAT = (
    "What is {t}?",
    "Explain {t} to a beginner.",
    "Give me five facts about {t}.",
    "Write a short story about {t}.",
    "Write a poem about {t}.",
    "What are the advantages and disadvantages of {t}?",
    "Give me tips about {t}.",
    "Write a dialogue between two friends about {t}.",
    "Describe {t} in two sentences.",
)
FOLLOW = ("Give me an example.", "Make it shorter.", "Rewrite it for children.", "Why?")
PASSAGE = ("Write a short paragraph about {t}.", "Write a short news report about {t}.")
SUMMARY = ("Summarize the following text.\n\n{x}", "Summarise this in two sentences:\n\n{x}")
REWRITE = (
    "Rewrite this text in a formal style:\n\n{x}",
    "Say the following in simple words.\n\n{x}",
    "{x}\n\nRewrite the text above in the past tense.",
)
QUESTION = (
    "{x}\n\nWhat is the main idea?",
    "Read the text and answer the question.\n\n{x}\n\nQuestion: What happens at the end?",
    "Context: {x}\n\nAnswer with the context above: Which reasons are given?",
)
RETRIEVAL = ("Which of these documents is about {t}?", "List the topic of each document.")
EDIT = ("Add a docstring to this code.", "Rename the variables.", "Add error handling.")
RECORDS = (
    "Write a JSON list of {n} objects with the fields {f}. Answer with JSON only.",
    "Turn this text into a JSON object with the fields title, summary and keywords.\n\n{x}",
)
MATHS = (
    "Anna has {a} {o}. She gives {b} of them to Ben and buys {c} more. How many does she have?",
    "What is {a} times {b} plus {c}? Show your work.",
    "A shop sells {o} for {c} dollars each. What do {a} of them cost? Explain.",
    "Solve for x: {c}x + {b} = {a}.",
)
SHARES = {
    "own": 0.25, "chat": 0.2, "turns": 0.08, "summary": 0.09, "question": 0.08, "rewrite": 0.09,
    "retrieval": 0.04, "mathematics": 0.07, "code": 0.05, "json": 0.05,
}  # fmt: skip


def passage(random: Random) -> str:
    return random.choice(PASSAGE).format(t=random.choice(TOPICS))


def program(random: Random) -> str:
    return f"Write a Python function that {random.choice(TASKS)}."


def turns(
    random: Random, asked: Sequence[str], passages: Sequence[str], programs: Sequence[str]
) -> tuple[str, list[str]]:
    """A category, and the turns of a chat that the model answers; the user's turn is the last."""
    (kind,) = random.choices(list(SHARES), list(SHARES.values()))
    topic, text = random.choice(TOPICS), random.choice(passages)
    words = {
        "t": topic, "x": text, "n": random.randint(2, 5), "f": random.choice(FIELDS),
        "a": random.randint(12, 90), "b": random.randint(2, 12), "c": random.randint(2, 9),
        "o": random.choice(THINGS),
    }  # fmt: skip
    forms = {"chat": CHAT, "summary": SUMMARY, "question": QUESTION, "rewrite": REWRITE,
             "mathematics": MATHS, "json": RECORDS}  # fmt: skip
    if kind in forms:
        return kind, [random.choice(forms[kind]).format(**words)]
    if kind == "turns":
        return kind, [random.choice(CHAT).format(**words), text, random.choice(FOLLOW)]
    if kind == "retrieval":
        some = random.sample(list(passages), min(3, len(passages)))
        documents = "\n\n".join(f"[{i}] {found[:500]}" for i, found in enumerate(some, 1))
        return kind, [f"{documents}\n\n{random.choice(RETRIEVAL).format(**words)}"]
    if kind == "code":
        return kind, [f"{random.choice(EDIT)}\n\n{random.choice(programs)}"]
    return "own", [random.choice(asked)]
