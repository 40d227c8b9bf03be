"""Word lists for generated worlds and tasks."""

from __future__ import annotations

FIRST_NAMES = (
    "Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Keiko", "Lars", "Maya",
    "Nadia", "Oskar", "Priya", "Quinn", "Rosa", "Samir", "Tove", "Umar", "Vera", "Wanda", "Xavier", "Yara", "Zeno",
)  # fmt: skip
LAST_NAMES = (
    "Abbott", "Berg", "Castro", "Dufour", "Eriksen", "Fontana", "Gupta", "Haas", "Ito", "Jensen", "Kaya", "Lindqvist",
    "Moreau", "Novak", "Okafor", "Pereira", "Rossi", "Sato", "Tanaka", "Ueda", "Vogel", "Weber", "Yilmaz", "Zhang",
)  # fmt: skip
CITIES = ("Bergen", "Delft", "Geneva", "Kyoto", "Lisbon", "Porto", "Quito", "Riga", "Sydney", "Turin")
RELATIONS = ("friend", "family", "coworker", "neighbour")
NOTE_TITLES = (
    "Soup recipe", "Books to read", "Garden plan", "Wifi at the cabin", "Ideas for the talk", "Running routes",
    "Words in Finnish", "Paint colours", "Film quotes", "Bike repair", "Questions for the vet", "Songs to learn",
)  # fmt: skip
SENTENCES = (
    "Start with the small one.", "Ask about the price first.", "Keep it short.", "Best in the morning.",
    "Look at this again in spring.", "The second half is better.", "Not before the holidays.", "Two of each.",
)  # fmt: skip
NOTE_TAGS = ("home", "ideas", "kitchen", "later", "music")
TASK_TITLES = (
    "Water the plants", "Renew passport", "Fix the tap", "Return library books", "Sort photos", "Call the dentist",
    "Clean the oven", "Order ink", "Book train tickets", "Wash the car", "Update the website", "File receipts",
    "Pick up parcel", "Back up laptop", "Hang the shelf", "Buy stamps",
)  # fmt: skip
TASK_LISTS = ("inbox", "home", "work")
EVENT_TITLES = (
    "Team lunch", "Design review", "Yoga class", "Choir practice", "Budget meeting", "Coffee with the board",
    "Piano lesson", "Site visit", "Board games", "Language exchange", "Planning hour", "Swimming",
)  # fmt: skip
PLACES = ("Room 4", "Town hall", "Cafe Linde", "Library", "Online", "Studio 2")
PAYMENT_NOTES = ("lunch", "tickets", "groceries", "taxi", "rent", "coffee", "books", "gift", "parking")
FILE_NAMES = ("report.txt", "plan.txt", "letter.txt", "ideas.txt", "draft.txt", "summary.txt")
FOLDERS = ("/docs", "/work", "/archive")
TINY_WORDS = (
    "milk", "tea", "rice", "salt", "eggs", "jam", "corn", "soap", "figs", "nuts", "bread", "plums", "beans", "honey",
    "olives", "flour",
)  # fmt: skip
