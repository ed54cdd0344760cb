"""Lists sources of tasks by name, without torch, to check configurations quickly."""

IMAGE_SIDES = (25, 128, 512)  # of the pictures that tasks are drawn from, in pixels

# The most points that a task of each source may have; None: no limit.
MAX_POINTS = {
    "gaussian_process": None,
    "published_gaussian_process": None,
    "images": IMAGE_SIDES[-1] ** 2,
}
