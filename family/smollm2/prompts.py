"""Prompts of eight kinds for a chat model that writes its own training text.

Lists and templates written for this project. Passages, code and most questions come from the model
itself, see `text.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

# fmt: off
TOPICS = (
    "volcanoes", "bicycles", "the water cycle", "bees and pollination", "how bread is baked",
    "chess openings", "the moon landing", "coral reefs", "steam engines", "sleep", "vaccines",
    "jazz music", "the Roman army", "glaciers", "a city park", "earthquakes", "solar panels",
    "tea ceremonies", "public libraries", "the heart", "satellites", "wolves", "recycling",
    "the printing press", "a weather station", "tides", "cheese making", "marathon training",
    "the immune system", "electric cars", "deserts", "photosynthesis", "lighthouses",
    "a small bakery", "rivers and floods", "the stock market", "password security", "penguins",
    "Renaissance painting", "how planes fly", "soil", "the history of zero",
    "gardening in winter", "antibiotics", "the human eye", "bridges", "a school newspaper",
    "wind turbines", "black holes", "rice farming", "mountain climbing", "a family holiday",
    "job interviews", "budget planning", "time management", "friendship",
    "a mystery in an old house", "a robot that learns to paint", "a lost dog",
    "a ship in a storm", "learning to cook", "online courses", "customer complaints",
    "remote work", "a board game night", "dinosaurs", "insects", "batteries",
    "computer networks", "databases", "sorting algorithms", "machine learning",
    "operating systems", "web browsers", "version control", "unit tests", "recursion", "climate",
    "oceans", "forests", "nutrition", "exercise", "stress", "music lessons", "languages",
    "translation", "poetry", "theatre", "photography", "film", "architecture", "trains",
    "airports", "ports and trade", "taxes", "elections", "courts", "journalism", "museums",
    "archaeology", "Egypt", "China's Great Wall", "the Silk Road", "Vikings",
    "the French Revolution", "the Industrial Revolution", "the telephone", "radio", "television",
    "the internet", "space telescopes", "Mars", "comets", "atoms", "chemical reactions",
    "electricity", "magnets", "sound waves", "light", "heat", "gravity", "probability",
    "geometry", "fractions", "prime numbers", "statistics", "economics", "insurance",
    "marketing", "a start-up", "a coffee shop", "a farm", "a hospital", "a fire station",
    "a football team", "swimming", "yoga", "skiing", "knitting", "woodworking", "pottery",
    "birds", "cats", "horses", "fish", "mushrooms", "spices", "chocolate", "soup", "salads",
    "a birthday party", "a wedding speech", "a thank-you letter", "an apology",
    "a complaint to a landlord", "a travel plan", "a packing list", "a reading list",
    "a study plan", "a weekly menu",
)

NAMES = (
    "Anna", "Ben", "Chen", "Divya", "Emre", "Fatima", "Greta", "Hassan", "Ivan", "Julia", "Kofi",
    "Lena", "Marco", "Nadia", "Omar", "Priya", "Quentin", "Rosa", "Sam", "Tara", "Umar", "Vera",
    "Wei", "Yusuf", "Zoe", "Tom", "Maria", "Peter", "Lucy", "David",
)

THINGS = (
    "apples", "pencils", "books", "tickets", "marbles", "cookies", "bottles", "stamps", "chairs",
    "balloons", "eggs", "oranges", "cards", "coins", "boxes", "shirts",
)

CODE = (
    "reverses a string", "checks whether a number is prime", "merges two sorted lists",
    "counts the words in a text", "computes the factorial of n",
    "finds the largest number in a list", "removes duplicates from a list",
    "converts Celsius to Fahrenheit", "checks whether a word is a palindrome",
    "computes the Fibonacci numbers up to n", "reads a CSV file and sums a column",
    "sorts a list of dictionaries by a key", "computes the average of a list",
    "finds the common items of two lists", "flattens a nested list",
    "groups words by their first letter", "validates an email address",
    "computes the area of a circle", "counts the vowels of a string",
    "finds the second largest number", "rotates a list by k places", "implements binary search",
    "implements bubble sort", "writes a dictionary to a JSON file", "parses a date string",
    "computes the greatest common divisor", "generates a random password",
    "checks balanced brackets", "transposes a matrix", "multiplies two matrices",
    "computes a moving average", "finds the longest word", "inverts a dictionary",
    "splits a list into chunks", "implements a stack class", "implements a queue class",
    "implements a bank account class", "counts how often each character occurs",
    "encodes text with a Caesar cipher", "converts a number to binary",
)
# fmt: on

EDITS = (
    "Add type hints to this function.",
    "Rename the variables so that they are clearer.",
    "Add a docstring to this code.",
    "Add error handling for wrong input.",
    "Change this code so that it also prints the result.",
    "Make this function shorter.",
    "Add comments that explain each line.",
    "Fix any bug in this code and show the whole code again.",
    "Turn this function into a method of a class.",
    "Add a default value for the first parameter.",
)

STYLES = (
    "in simpler words",
    "in a formal style",
    "in the past tense",
    "for a ten-year-old",
    "as an email to a colleague",
    "in the first person",
    "as a news report",
    "in a friendly tone",
    "more briefly",
    "with more detail",
    "as a list of bullet points",
    "in British English",
)

ASKS = (
    "What is {t}?",
    "Explain {t} to a beginner.",
    "Why is {t} important?",
    "Give me five facts about {t}.",
    "Write a short story about {t}.",
    "Write a poem about {t}.",
    "What should I know about {t}?",
    "How can I learn more about {t}?",
    "What are the advantages and disadvantages of {t}?",
    "Write an essay about {t}.",
    "Give me tips about {t}.",
    "Make a plan for a lesson about {t}.",
    "Compare {t} with {u}.",
    "Write a dialogue between two friends about {t}.",
    "Tell me something surprising about {t}.",
    "I am writing an article about {t}. Help me with an outline.",
    "What are common mistakes people make with {t}?",
    "Describe {t} in two sentences.",
    "Who would be interested in {t} and why?",
    "Write a product description that has to do with {t}.",
)

FOLLOW = (
    "Can you explain that in more detail?",
    "Give me an example.",
    "Make it shorter.",
    "Rewrite it for children.",
    "What are the main points?",
    "And what about {t}?",
    "Why?",
    "Turn that into a list.",
    "Write it again in a formal style.",
    "Thanks. What should I do next?",
    "Can you give me three more?",
    "Summarise your answer in one sentence.",
)

RECORDS = (
    "name, age, city",
    "title, author, year, pages",
    "product, price, stock",
    "id, email, active",
    "city, country, population",
    "event, date, place, guests",
    "course, teacher, room, hours",
    "dish, ingredients, minutes",
    "team, wins, losses",
    "device, serial, status",
)

PARAGRAPHS = (
    "Write a short paragraph about {topic}.",
    "Write a paragraph of five sentences about {topic}.",
    "Write a short news report about {topic}.",
    "Write a short story about {topic}.",
    "Explain {topic}.",
)
SUMMARIES = (
    "Summarize the following text.\n\n{text}",
    "Summarise this in two sentences:\n\n{text}",
    "{text}\n\nWhat are the key points of this text?",
    "Give a short summary of the passage below.\n\n{text}",
    "TL;DR of this, please:\n\n{text}",
)
QUESTIONS = (
    "What is the main idea?",
    "What does the text say about the beginning?",
    "Which reasons are given?",
    "What happens at the end?",
    "Who or what is the text about?",
    "Which numbers or dates are mentioned?",
    "What can we learn from it?",
    "What problem is described, and what is done about it?",
)
QUESTION_FORMS = (
    "Read the text and answer the question.\n\n{text}\n\nQuestion: {question}",
    "{text}\n\n{question}",
    "Context: {text}\n\nAnswer with the context above: {question}",
)
REWRITES = (
    "Rewrite this text {style}:\n\n{text}",
    "Say the following {style}.\n\n{text}",
    "{text}\n\nRewrite the text above {style}.",
)
RETRIEVALS = (
    "Which of these documents is about {topic}? Quote the relevant sentence.",
    "Answer from the documents above: what is said about {topic}?",
    "List the topic of each document.",
    "Use the documents to write a short answer: what is {topic}?",
)


def topic(random: Random) -> str:
    return random.choice(TOPICS)


def paragraph(random: Random) -> str:
    return random.choice(PARAGRAPHS).format(topic=topic(random))


def program(random: Random) -> str:
    end = random.choice((".", ". Answer with code only.", " and explain it."))
    return f"Write a Python function that {random.choice(CODE)}{end}"


def question(random: Random) -> str:
    return random.choice(ASKS).format(t=topic(random), u=topic(random))


def follow_up(random: Random) -> str:
    return random.choice(FOLLOW).format(t=topic(random))


def summary(random: Random, text: str) -> str:
    return random.choice(SUMMARIES).format(text=text)


def question_about(random: Random, text: str) -> str:
    form = random.choice(QUESTION_FORMS)
    return form.format(text=text, question=random.choice(QUESTIONS))


def rewrite(random: Random, text: str) -> str:
    return random.choice(REWRITES).format(text=text, style=random.choice(STYLES))


def retrieval(random: Random, texts: Sequence[str]) -> str:
    documents = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))
    return f"{documents}\n\n{random.choice(RETRIEVALS).format(topic=topic(random))}"


def edit(random: Random, code: str) -> str:
    wish, block = random.choice(EDITS), f"```python\n{code}\n```"
    if random.random() < 0.5:
        return f"{wish}\n\n{block}"
    return f"Here is my code:\n\n{block}\n\n{wish}"


def records(random: Random, text: str) -> str:
    fields = random.choice(RECORDS)
    return random.choice(
        (
            f"Write a JSON list of {random.randint(2, 6)} objects with the fields {fields}. "
            "Answer with JSON only.",
            f"Generate example data as JSON with the fields {fields}, for something that has to "
            f"do with {topic(random)}.",
            f"Extract the names, places and numbers from this text as JSON.\n\n{text}",
            "Turn this text into a JSON object with the fields title, summary and keywords."
            f"\n\n{text}",
        )
    )


def sum_of_words(random: Random) -> str:
    """A problem of school mathematics."""
    a, b, c = random.randint(2, 60), random.randint(2, 40), random.randint(2, 12)
    one, other = random.choice(NAMES), random.choice(NAMES)
    things = random.choice(THINGS)
    return random.choice(
        (
            f"{one} has {a + b} {things}. {one} gives {b} of them to {other}. Then {other} buys "
            f"{c} more. How many {things} does each of them have? Explain step by step.",
            f"A shop sells {things} for {c} dollars each. {one} buys {a} of them and pays with a "
            f"{100 * c}-dollar bill. How much change does {one} get?",
            f"What is {a} times {b} plus {c}? Show your work.",
            f"{one} walks {a} km in {c} hours. How fast is that on average? How far does {one} "
            f"walk in {b} hours?",
            f"Solve for x: {c}x + {b} = {c * a + b}.",
            f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            f"{one} reads {a} pages a day. The book has {a * b} pages. How many days does it "
            f"take? What if {one} reads {c} pages more each day?",
            f"In a class of {a + b} students, {b} play football. What percentage is that? Explain.",
            f"There are {a} {things} in each box and {b} boxes. {c} {things} are broken. "
            "How many are good?",
            f"Find the next three numbers: {a}, {a + c}, {a + 2 * c}, {a + 3 * c}. "
            "What is the rule?",
        )
    )
