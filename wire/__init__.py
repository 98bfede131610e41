"""What both kinds of workers share: messages to dataclasses, errors to statuses, the step loop, status."""
